"""What the agent is made of once its state is open, and which part gets which other. A new service is added here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ugro.features.discovery.service import Discovery
from ugro.features.environments.service.installed import Environments
from ugro.features.environments.service.node_envs import KeptEnvironments
from ugro.features.environments.service.service import PythonEnvService
from ugro.features.hardware.service import HardwareService, MeasuredHardware
from ugro.features.hooks.service import HookService
from ugro.features.planning.forecasts import Forecasts
from ugro.features.planning.service import PlanService, Trials
from ugro.features.power.service import PowerService
from ugro.features.quotas.service import UsageService
from ugro.features.ray.service import RayClusters
from ugro.features.ray.starting import Starting
from ugro.features.recipes.service import RecipeService
from ugro.features.retention.config import RetentionSection
from ugro.features.retention.service import Retention
from ugro.features.safe_mode.reconcile import Reconciler
from ugro.features.services.service.creation import Creation
from ugro.features.services.service.door import DoorPlaces
from ugro.features.services.service.replicas import ReplicaWatch
from ugro.features.services.service.service import Services
from ugro.features.sweeps.service.listening import Listening
from ugro.features.sweeps.service.runner import Measuring
from ugro.features.sweeps.service.service import SweepService
from ugro.features.sweeps.service.studies import Studies
from ugro.features.training.service import Profiling
from ugro.kernel.access.service import AuditLog
from ugro.kernel.agent.backups import Backups
from ugro.kernel.agent.clock import ClockWatch
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.results.checkpoints import CheckpointSync
from ugro.kernel.files.results.collector import Collector, checkpoint_env
from ugro.kernel.files.results.log_mirror import LogMirror, SmallLogs
from ugro.kernel.files.results.output_sync import OutputSync
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.engine.launch import Planner
from ugro.kernel.jobs.engine.placed_runs import PlacedRuns
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.result_cache import ResultCache
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import SubmissionReader
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.logins import Logins
from ugro.kernel.links.node import Identity
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.links.tunnels import SocketTarget, connect
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.service import MonitoringService, ranks_by


@dataclass(frozen=True, slots=True)
class Base:
    """What stands before the state is open."""

    home: StateDir
    store: Store
    cluster: Cluster
    health: HealthCheck
    discovery: Discovery
    measured: MeasuredHardware
    monitoring: MonitoringService
    backups: Backups
    audit: AuditLog
    kept_environments: KeptEnvironments
    logins: Mapping[str, bool]  # that jobs were started through before, and whether they are clear


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Engine
    scheduler_input: SchedulerInput
    clock_watch: ClockWatch
    code: Code
    python_envs: PythonEnvService
    results: ResultService
    profiling: Profiling
    reconciler: Reconciler
    retention: Retention
    hardware: HardwareService
    jobs: JobService
    planning: PlanService
    sweeps: SweepService
    ray_clusters: RayClusters
    services: Services
    recipes: RecipeService
    power: PowerService
    hooks: HookService
    usage: UsageService


@dataclass(frozen=True, slots=True)
class _Footing:
    """What the engine stands on."""

    identity: Identity
    watch: RunTracker
    logs: SmallLogs
    scheduler_input: SchedulerInput
    clock_watch: ClockWatch
    code: Code
    python_envs: PythonEnvService
    environments: Environments
    planner: Planner
    collector: Collector


def make_parts(base: Base, identity: Identity) -> Parts:
    placed = PlacedRuns(base.store.jobs)
    footing = _footing(base, identity, placed)
    watch, scheduler_input = footing.watch, footing.scheduler_input
    engine = Engine(
        base.store.jobs, watch, footing.planner, footing.code, scheduler_input, footing.collector
    )
    engine.logins.remember(base.logins, base.store.logins.clear)
    footing.python_envs.reached = engine.logins.reached
    placed.live = engine.live.get
    _inform_health(base, engine, watch)
    results = ResultService(
        base.home.jobs, base.store, watch, footing.collector, base.monitoring.measured, base.monitoring.energy.of
    )
    jobs, forecasts = _job_service(base, footing, engine)
    trials = Trials(base.home.jobs, base.store.trials, jobs, results)
    clusters = _ray_clusters(base, footing, jobs, engine.logins)
    return Parts(
        engine=engine,
        scheduler_input=scheduler_input,
        clock_watch=footing.clock_watch,
        code=footing.code,
        python_envs=footing.python_envs,
        results=results,
        profiling=Profiling(base.home.jobs, base.store.jobs, jobs, watch, base.monitoring.energy),
        reconciler=_reconciler(base, footing, engine),
        retention=_retention(base, engine, results, footing.clock_watch),
        hardware=_hardware(base, footing, engine),
        jobs=jobs,
        planning=PlanService(jobs, forecasts, trials),
        sweeps=_sweeps(base, footing, engine, jobs, results),
        ray_clusters=clusters,
        services=_services(base, footing, jobs, results, clusters),
        recipes=RecipeService(base.cluster, jobs, scheduler_input, footing.python_envs, identity),
        power=_power(base, footing, engine),
        hooks=HookService(base.store, base.cluster, engine, scheduler_input),
        usage=UsageService(base.store.usage, engine.live, scheduler_input, base.monitoring.energy.price),
    )


def _footing(base: Base, identity: Identity, placed: PlacedRuns) -> _Footing:
    home, jobs, cluster = base.home, base.store.jobs, base.cluster
    watch = RunTracker(cluster.inventory, identity, placed)
    base.discovery.uncollected = watch.uncollected
    logs = SmallLogs(jobs, LogMirror(home.jobs, watch, base.monitoring.energy.note_change))
    scheduler_input = SchedulerInput(jobs, cluster, base.health)
    clock_watch = ClockWatch(scheduler_input.clock, base.store, lambda: cluster.config.section(RetentionSection).notice)
    base.backups.may_remove = clock_watch.may_remove

    async def tell(job: Job, text: str) -> None:
        await jobs.note("preflight", text, job=job)

    checkpoints = CheckpointSync(home.jobs, cluster.inventory.get, identity, tell)
    code = Code(home, base.store, cluster, identity)
    environments = Environments(base.store.environments, watch)
    envs = PythonEnvService(home, base.store, cluster, code, identity)
    envs.on_made = base.kept_environments.tidy_soon
    extra_env = environments.recording(checkpoint_env(checkpoints))
    planner = Planner(cluster, watch, extra_env, scheduler_input.facts, scheduler_input.modules, envs)
    planner.measured = base.measured.latest_of
    outputs = OutputSync(home.jobs, cluster.inventory.get, identity, code.result_rules)
    collector = Collector(jobs, watch, logs, checkpoints, outputs, environments)
    return _Footing(
        identity, watch, logs, scheduler_input, clock_watch, code, envs, environments, planner, collector
    )


def _inform_health(base: Base, engine: Engine, watch: RunTracker) -> None:
    health = base.health
    health.speeds = base.measured.speeds
    health.ranks = partial(ranks_by, engine, watch)
    health.has_jobs = engine.live.has_jobs_on
    health.refusal = watch.refusal
    health.strange_runs = watch.strange


def _job_service(base: Base, footing: _Footing, engine: Engine) -> tuple[JobService, Forecasts]:
    scheduler_input = footing.scheduler_input
    cache = ResultCache(base.store.jobs, footing.environments, footing.python_envs)
    forecasts = Forecasts(base.store.trials, base.store.hardware, base.cluster, scheduler_input.facts)
    submitting = SubmissionReader(base.store, scheduler_input, base.cluster, footing.code, cache, forecasts)
    submitting.envs = footing.python_envs
    return JobService(base.store, engine, scheduler_input, footing.logs, footing.planner, submitting), forecasts


def _reconciler(base: Base, footing: _Footing, engine: Engine) -> Reconciler:
    reconciler = Reconciler(base.store.jobs, footing.watch, engine.safe_mode)
    reconciler.on_decided = footing.scheduler_input.reports.look_at_all_again
    return reconciler


def _retention(base: Base, engine: Engine, results: ResultService, clock_watch: ClockWatch) -> Retention:
    retention = Retention(
        base.home.jobs,
        base.store,
        base.monitoring.metrics,
        results,
        lambda: base.cluster.config.section(RetentionSection),
        clock_watch.may_remove,
    )
    retention.kept_environments = base.kept_environments.names
    retention.on_removed = base.monitoring.forget_jobs
    retention.is_paused = lambda: engine.safe_mode.is_on
    return retention


def _hardware(base: Base, footing: _Footing, engine: Engine) -> HardwareService:
    holds = footing.scheduler_input.holds
    holds.on_change = engine.wake
    return HardwareService(base.cluster, base.health, engine, holds, base.measured, footing.identity)


def _power(base: Base, footing: _Footing, engine: Engine) -> PowerService:
    power = PowerService(base.store, base.cluster, engine, footing.scheduler_input)
    power.uncollected = footing.watch.uncollected
    power.looks.is_heard = lambda node: footing.watch.silent_s(node) == 0
    base.health.power = power.report
    base.discovery.is_sleeping = power.is_sleeping
    return power


def _sweeps(base: Base, footing: _Footing, engine: Engine, jobs: JobService, results: ResultService) -> SweepService:
    async def dial(node: str, target: SocketTarget) -> Duplex:
        ready_s = 2 * base.cluster.config.ssh.connect_timeout
        return await connect(base.cluster.inventory.get(node), footing.identity, target, ready_s=ready_s)

    measuring = Measuring(base.store.jobs, base.monitoring, results, Listening(footing.watch.runs))
    sweeps = SweepService(base.store, jobs, engine.changed, measuring, base.monitoring.grown)
    sweeps.studies = Studies(base.home.path / "sweeps", dial)
    return sweeps


def _ray_clusters(base: Base, footing: _Footing, jobs: JobService, logins: Logins) -> RayClusters:
    gpus = footing.scheduler_input.gpus
    starting = Starting(
        base.cluster, jobs, footing.python_envs, lambda: base.health.speeds(gpus), logins.name_for
    )
    return RayClusters(base.home.jobs, base.store, base.cluster, jobs, starting, base.audit)


def _services(
    base: Base, footing: _Footing, jobs: JobService, results: ResultService, clusters: RayClusters
) -> Services:
    creation = Creation(base.store.services, jobs, results, DoorPlaces(base.cluster))
    watch = ReplicaWatch(base.cluster, lambda: footing.identity)
    services = Services(base.store, base.cluster, jobs, creation, watch)
    services.identity = lambda: footing.identity
    services.speeds = lambda: base.health.speeds(footing.scheduler_input.gpus)
    return services
