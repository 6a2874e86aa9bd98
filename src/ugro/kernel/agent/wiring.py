"""What the agent is made of once its state is open, and which part gets which other. A new service is added here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ugro.features.alerts.service import Rounds, Sources
from ugro.features.discovery.service import Discovery, Members, Ties
from ugro.features.environments.service.installed import Environments
from ugro.features.environments.service.node_envs import KeptEnvironments
from ugro.features.environments.service.service import Around, PythonEnvService
from ugro.features.hardware.service import HardwareService, MeasuredHardware
from ugro.features.hooks.service import HookService
from ugro.features.planning.forecasts import Forecasts
from ugro.features.planning.service import PlanService, Trials
from ugro.features.power.owners import owners_of
from ugro.features.power.service import PowerService, Sleepers
from ugro.features.quotas.service import UsageService
from ugro.features.ray.service import RayClusters
from ugro.features.ray.starting import Starting
from ugro.features.recipes.service import RecipeService
from ugro.features.retention.config import RetentionSection
from ugro.features.retention.service import Limits, Retention
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
from ugro.kernel.agent.clock import ClockWatch
from ugro.kernel.agent.model import Finding
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.results.checkpoints import CheckpointSync
from ugro.kernel.files.results.collector import Collector, checkpoint_env
from ugro.kernel.files.results.log_mirror import LogMirror, SmallLogs
from ugro.kernel.files.results.output_sync import OutputSync
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.engine.launch import Hardware, Planner
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.placed_runs import PlacedRuns
from ugro.kernel.jobs.engine.reconciler import Engine, Knowledge
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput, Standings
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.result_cache import ResultCache
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Helpers, SubmissionReader
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.host_keys import Examiner, Hosts
from ugro.kernel.links.node import Identity
from ugro.kernel.links.reports import HealthCheck, NodeNotes
from ugro.kernel.links.tunnels import SocketTarget, Tunnels, connect
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.service import MonitoringService, ranks_by


@dataclass(frozen=True, slots=True)
class Base:
    """What stands before it is known which agent this is."""

    home: StateDir
    store: Store
    cluster: Cluster
    clock_watch: ClockWatch
    members: Members
    measured: MeasuredHardware
    audit: AuditLog
    own_disk: Callable[[], Finding | None]
    logins: Mapping[str, bool]  # that jobs were started through before, and whether they are clear


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Engine
    scheduler_input: SchedulerInput
    health: HealthCheck
    hosts: Hosts
    discovery: Discovery
    monitoring: MonitoringService
    kept_environments: KeptEnvironments
    tunnels: Tunnels
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
    sleepers: Sleepers
    power: PowerService
    hooks: HookService
    usage: UsageService


@dataclass(frozen=True, slots=True)
class _View:
    """What is known of nodes and jobs, and who finds it out."""

    identity: Identity
    known: Knowledge
    sleepers: Sleepers
    health: HealthCheck
    examiner: Examiner
    discovery: Discovery
    scheduler_input: SchedulerInput
    monitoring: MonitoringService


@dataclass(frozen=True, slots=True)
class _Footing:
    """What the engine stands on."""

    logs: SmallLogs
    code: Code
    kept_environments: KeptEnvironments
    python_envs: PythonEnvService
    environments: Environments
    planner: Planner
    collector: Collector


def make_parts(base: Base, identity: Identity) -> Parts:
    view = _view(base, identity)
    footing = _footing(base, view)
    known, scheduler_input, monitoring = view.known, view.scheduler_input, view.monitoring
    watch, live = known.watch, known.live
    engine = Engine(base.store.jobs, known, footing.planner, footing.code, scheduler_input, footing.collector)
    results = ResultService(
        base.home.jobs, base.store, watch, footing.collector, monitoring.measured, monitoring.energy.of
    )
    jobs, forecasts = _job_service(base, view, footing, engine)
    clusters = _ray_clusters(base, view, footing, jobs)
    power = PowerService(base.store, base.cluster, engine, scheduler_input, view.sleepers, watch)
    return Parts(
        engine=engine,
        scheduler_input=scheduler_input,
        health=view.health,
        hosts=Hosts(base.cluster, view.examiner, view.discovery.candidate),
        discovery=view.discovery,
        monitoring=monitoring,
        kept_environments=footing.kept_environments,
        tunnels=Tunnels(base.cluster, identity, jobs.find, known.logins.name_for),
        code=footing.code,
        python_envs=footing.python_envs,
        results=results,
        profiling=Profiling(base.home.jobs, base.store.jobs, jobs, watch, monitoring.energy),
        reconciler=Reconciler(base.store.jobs, watch, known.safe_mode, scheduler_input.reports.look_at_all_again),
        retention=_retention(base, view, footing, results),
        hardware=HardwareService(base.cluster, view.health, engine, scheduler_input.holds, base.measured, identity),
        jobs=jobs,
        planning=PlanService(jobs, forecasts, Trials(base.home.jobs, base.store.trials, jobs, results)),
        sweeps=_sweeps(base, view, jobs, results),
        ray_clusters=clusters,
        services=_services(base, view, jobs, results),
        recipes=RecipeService(base.cluster, jobs, scheduler_input, footing.python_envs, identity),
        sleepers=view.sleepers,
        power=power,
        hooks=HookService(base.store, base.cluster, engine, scheduler_input),
        usage=UsageService(base.store.usage, live, scheduler_input, monitoring.energy.price),
    )


def _view(base: Base, identity: Identity) -> _View:
    store, cluster, clock, measured = base.store, base.cluster, base.clock_watch.clock, base.measured
    live = LiveJobs(store.jobs, clock.reading)
    watch = RunTracker(cluster.inventory, identity, PlacedRuns(store.jobs, live.get))
    known = Knowledge.of(store.jobs, live, watch)
    known.logins.remember(base.logins, store.logins.clear)
    owners = owners_of(cluster, store.jobs)
    sleepers = Sleepers(store.power, cluster, clock.reading)
    health = HealthCheck(
        cluster,
        store,
        NodeNotes(
            ranks=partial(ranks_by, live, watch),
            refusal=watch.refusal,
            speeds=measured.speeds,
            has_jobs=live.has_jobs_on,
            owner=owners.report,
            owners_changed=owners.changed,
            power=sleepers.report,
            strange_runs=watch.strange,
        ),
    )
    examiner = Examiner(cluster, health)
    ties = Ties(lambda: not known.safe_mode.is_on, sleepers.is_sleeping, watch.uncollected)
    discovery = Discovery(base.members, cluster, health, examiner, ties)
    rounds = Rounds(cluster, lambda: live.count)
    standings = Standings(clock, owners, rounds.pause_s, sleepers.sleeping, discovery.settled)
    scheduler_input = SchedulerInput(store.jobs, cluster, health, standings)
    sources = Sources(scheduler_input.reports, rounds, base.own_disk, measured.findings, clock.may_remove)
    monitoring = MonitoringService(base.home, store, cluster, live, sources, measured)
    clock.listen(monitoring.monitor.clock_was_set)
    return _View(identity, known, sleepers, health, examiner, discovery, scheduler_input, monitoring)


def _footing(base: Base, view: _View) -> _Footing:
    home, jobs, cluster, identity = base.home, base.store.jobs, base.cluster, view.identity
    watch, scheduler_input, energy = view.known.watch, view.scheduler_input, view.monitoring.energy

    async def tell(job: Job, text: str) -> None:
        await jobs.note("preflight", text, job=job)

    logs = SmallLogs(jobs, LogMirror(home.jobs, watch, energy.note_change))
    checkpoints = CheckpointSync(home.jobs, cluster.inventory.get, identity, tell)
    code = Code(home, base.store, cluster, identity)
    environments = Environments(base.store.environments, watch)
    kept = KeptEnvironments(cluster, identity)
    around = Around(view.known.logins.reached, kept.tidy_soon)
    envs = PythonEnvService(home, base.store, cluster, code, identity, around)
    extra_env = environments.recording(checkpoint_env(checkpoints))
    hardware = Hardware(scheduler_input.facts, base.measured.latest_of)
    planner = Planner(cluster, watch, extra_env, hardware, scheduler_input.modules, envs)
    outputs = OutputSync(home.jobs, cluster.inventory.get, identity, code.result_rules)
    collector = Collector(jobs, watch, logs, checkpoints, outputs, environments)
    return _Footing(logs, code, kept, envs, environments, planner, collector)


def _job_service(base: Base, view: _View, footing: _Footing, engine: Engine) -> tuple[JobService, Forecasts]:
    scheduler_input, envs = view.scheduler_input, footing.python_envs
    cache = ResultCache(base.store.jobs, footing.environments, envs)
    forecasts = Forecasts(base.store.trials, base.store.hardware, base.cluster, scheduler_input.facts)
    helpers = Helpers(footing.code, cache, forecasts, envs)
    submitting = SubmissionReader(base.store, scheduler_input, base.cluster, helpers)
    return JobService(base.store, engine, scheduler_input, footing.logs, footing.planner, submitting), forecasts


def _retention(base: Base, view: _View, footing: _Footing, results: ResultService) -> Retention:
    monitoring, safe_mode, kept = view.monitoring, view.known.safe_mode, footing.kept_environments
    limits = Limits(base.clock_watch.may_remove, lambda: safe_mode.is_on, kept.names, monitoring.forget_jobs)
    folder, metrics, cluster = base.home.jobs, monitoring.metrics, base.cluster
    return Retention(folder, base.store, metrics, results, lambda: cluster.config.section(RetentionSection), limits)


def _sweeps(base: Base, view: _View, jobs: JobService, results: ResultService) -> SweepService:
    async def dial(node: str, target: SocketTarget) -> Duplex:
        ready_s = 2 * base.cluster.config.ssh.connect_timeout
        return await connect(base.cluster.inventory.get(node), view.identity, target, ready_s=ready_s)

    monitoring, known = view.monitoring, view.known
    measuring = Measuring(base.store.jobs, monitoring, results, Listening(known.watch.runs))
    studies = Studies(base.home.path / "sweeps", dial)
    return SweepService(base.store, jobs, known.live.changed, measuring, monitoring.grown, studies)


def _ray_clusters(base: Base, view: _View, footing: _Footing, jobs: JobService) -> RayClusters:
    gpus, speeds = view.scheduler_input.gpus, base.measured.speeds
    starting = Starting(base.cluster, jobs, footing.python_envs, lambda: speeds(gpus), view.known.logins.name_for)
    return RayClusters(base.home.jobs, base.store, base.cluster, jobs, starting, base.audit)


def _services(base: Base, view: _View, jobs: JobService, results: ResultService) -> Services:
    creation = Creation(base.store.services, jobs, results, DoorPlaces(base.cluster))
    gpus, speeds = view.scheduler_input.gpus, base.measured.speeds
    watch = ReplicaWatch(base.cluster, view.identity)
    return Services(base.store, base.cluster, jobs, creation, watch, lambda: speeds(gpus))
