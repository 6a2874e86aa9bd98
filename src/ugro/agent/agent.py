"""The agent: the process that knows the cluster and decides. Every request of a client is a method here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import ugro
from ugro.agent.artifacts.checkpoint_sync import CheckpointSync
from ugro.agent.artifacts.collector import Collector, checkpoint_env
from ugro.agent.artifacts.environments import Environments
from ugro.agent.artifacts.inline_logs import SmallLogs
from ugro.agent.artifacts.log_mirror import LogMirror
from ugro.agent.artifacts.output_sync import OutputSync
from ugro.agent.code.service import Code
from ugro.agent.dashboard_address import DashboardAddress
from ugro.agent.discovery.service import Discovery
from ugro.agent.engine.planner import Planner
from ugro.agent.engine.reconciler import Engine
from ugro.agent.hardware.service import HardwareService
from ugro.agent.jobs.forecasts import Forecasts
from ugro.agent.jobs.result_cache import ResultCache
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.retention import Retention
from ugro.agent.jobs.service import JobService
from ugro.agent.jobs.submission import SubmissionReader
from ugro.agent.monitoring.profiling import Profiling
from ugro.agent.monitoring.service import MonitoringService, ranks_by
from ugro.agent.ops.audit import AuditLog
from ugro.agent.ops.backups import Backups
from ugro.agent.ops.doctor import Doctor
from ugro.agent.ops.exec import Command, Execution
from ugro.agent.ops.hosts import Hosts
from ugro.agent.ops.kept_environments import KeptEnvironments
from ugro.agent.ops.tunnels import Tunnels
from ugro.agent.planning.service import PlanService
from ugro.agent.planning.trials import Trials
from ugro.agent.python_env.service import PythonEnvService
from ugro.agent.ray_cluster.service import RayClusters
from ugro.agent.ray_cluster.starting import Starting
from ugro.agent.safe_mode.control import SafeModeControl, begin, is_known_old
from ugro.agent.safe_mode.reconcile import Reconciler
from ugro.agent.safe_mode.records import Comparison, Records
from ugro.agent.support.aio import keep_running
from ugro.agent.sweep.service import SweepService
from ugro.agent.tracking.clock_watch import ClockWatch
from ugro.agent.tracking.cluster import Cluster, Guard
from ugro.agent.tracking.health import HealthCheck
from ugro.agent.tracking.measured import MeasuredHardware
from ugro.agent.tracking.placed_runs import PlacedRuns
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.config.allowance import Allowances, Effects, keep_allowed
from ugro.config.edit import add_node, remove_node, write_atomically
from ugro.config.environment import differing
from ugro.config.load import read_text
from ugro.core.agent import AgentStatus
from ugro.core.cluster_file import ServedFile
from ugro.core.errors import ConfigError, NotAllowed, NotFound, Unsatisfiable
from ugro.core.finding import Finding, Grade
from ugro.core.job import FINAL_STATES, JobState
from ugro.core.node import NodeReport
from ugro.core.support.state_dir import StateDir
from ugro.nodes.runs import Identity
from ugro.policy.nodes.diagnosis import judge_state
from ugro.policy.scheduling.selection import Choice
from ugro.store.database import Store
from ugro.store.engine import Opening

log = logging.getLogger(__name__)


class Agent:
    _ray_clusters: RayClusters | None = None
    _sweeps: SweepService | None = None

    def __init__(self, home: StateDir, cluster_file: ServedFile) -> None:
        self.home = home
        self.store = Store(home.database)
        self.backups = Backups(home, self.store)
        self.allowances = Allowances(home)
        self.audit = AuditLog(self.store.audit)
        self.cluster = Cluster(cluster_file.path, self._guard(cluster_file))
        self.health = HealthCheck(self.cluster, self.store)
        self.hosts = Hosts(self.cluster, self.health)
        self.discovery = Discovery(self.store.discovered, self.cluster, self.health, self.hosts)
        self.measured = MeasuredHardware(self.store.hardware)
        self.stopping = asyncio.Event()
        self._started_at = datetime.now(UTC)
        self._executions: dict[str, Execution] = {}
        self.dashboard = DashboardAddress()
        self.monitoring = MonitoringService(home, self.store, self.cluster)
        self._engine: Engine | None = None
        self._job_service: JobService | None = None
        self._code: Code | None = None
        self._python_envs: PythonEnvService | None = None
        self._result_service: ResultService | None = None
        self._profiling: Profiling | None = None
        self._hardware: HardwareService | None = None
        self._planning: PlanService | None = None
        self._retention: Retention | None = None
        self._records: Records | None = None
        self._identity = Identity("", 0)
        self._reconciler: Reconciler | None = None
        self._clock_watch: ClockWatch | None = None
        self.kept_environments = KeptEnvironments(self.cluster, lambda: self._identity)
        self.tunnels = Tunnels(self.cluster, self.audit, lambda: self._identity, lambda word: self.jobs.find(word))

    async def start(self, on_progress: Callable[[str], None] = lambda text: None) -> None:
        await self.store.open(Opening(on_progress, self.backups.before_use))
        self._records = records = await asyncio.to_thread(Records, self.home)
        compared = await self._compare(records)
        identity = Identity(await self.store.agent_id(), await self._generation(compared), records.key)
        await self.discovery.load()
        await self.cluster.start()
        _remember(self.home, self.cluster)
        engine, scheduler_input = self._make_engine(identity)
        self.python_envs.on_made = self.kept_environments.tidy_soon
        self.discovery.may_leave = lambda: not engine.safe_mode.is_on
        await begin(engine.safe_mode, records, compared)
        self.store.jobs.keep_journal(engine.safe_mode.note)
        await self.clock_watch.start()
        await self.measured.read()
        await self.monitoring.open(engine, scheduler_input)
        self.monitoring.use_figures(self.measured)
        self.code.listen(self.monitoring.parts.prometheus.observe_sync)
        await self.planning.end_left()

    async def _compare(self, records: Records) -> Comparison:
        """Before anything is changed: whether the state is the newest."""
        agent, numbers = await self.store.agent_id(), await self.store.jobs.standing.numbers()
        live = await self.store.jobs.in_states(frozenset(JobState) - FINAL_STATES)
        return await asyncio.to_thread(records.compare, agent, numbers, live)

    async def _generation(self, compared: Comparison) -> int:
        """A state that is known to be old keeps its own: nodes obey the newer one when that is put back instead."""
        if compared.reasons or await is_known_old(self.store.jobs):
            return (await self.store.jobs.standing.numbers()).generation
        return await self.store.next_generation()

    async def close(self) -> None:
        self.cancel_all()
        if self._engine is not None:
            await self._engine.close()
        await self.monitoring.close()
        for part in (self.kept_environments, self._python_envs, self._code):
            if part is not None:
                await part.close()
        await self.cluster.inventory.close()
        await self.audit.flush()
        await self.store.close()
        if self._records is not None:
            self._records.close()

    @property
    def reconciler(self) -> Reconciler:
        assert self._reconciler is not None, "the agent has not started"
        return self._reconciler

    @property
    def safe_mode(self) -> SafeModeControl:
        assert self._engine is not None, "the agent has not started"
        return self._engine.safe_mode

    @property
    def jobs(self) -> JobService:
        assert self._job_service is not None, "the agent has not started"
        return self._job_service

    @property
    def results(self) -> ResultService:
        assert self._result_service is not None, "the agent has not started"
        return self._result_service

    @property
    def profiling(self) -> Profiling:
        assert self._profiling is not None, "the agent has not started"
        return self._profiling

    @property
    def hardware(self) -> HardwareService:
        assert self._hardware is not None, "the agent has not started"
        return self._hardware

    @property
    def planning(self) -> PlanService:
        assert self._planning is not None, "the agent has not started"
        return self._planning

    @property
    def sweeps(self) -> SweepService:
        assert self._sweeps is not None, "the agent has not started"
        return self._sweeps

    @property
    def ray_clusters(self) -> RayClusters:
        assert self._ray_clusters is not None, "the agent has not started"
        return self._ray_clusters

    @property
    def code(self) -> Code:
        assert self._code is not None, "the agent has not started"
        return self._code

    @property
    def python_envs(self) -> PythonEnvService:
        assert self._python_envs is not None, "the agent has not started"
        return self._python_envs

    async def run_jobs(self) -> None:
        assert self._engine is not None, "the agent has not started"
        await self._engine.run()

    @property
    def clock_watch(self) -> ClockWatch:
        assert self._clock_watch is not None, "the agent has not started"
        return self._clock_watch

    async def watch_clock(self) -> None:
        await keep_running(self.clock_watch.run)

    async def run_retention(self) -> None:
        assert self._retention is not None, "the agent has not started"
        await keep_running(self._retention.run)

    def _make_engine(self, identity: Identity) -> tuple[Engine, SchedulerInput]:
        jobs = self.store.jobs
        self._identity = identity
        placed = PlacedRuns(jobs)
        watch = RunTracker(self.cluster.inventory, identity, placed)
        self.discovery.uncollected = watch.uncollected
        logs = SmallLogs(jobs, LogMirror(self.home.jobs, watch, self.monitoring.energy.note_change))
        scheduler_input = SchedulerInput(jobs, self.cluster, self.health)
        watch_clock = self._clock_watch = ClockWatch(
            scheduler_input.clock, self.store, lambda: self.cluster.config.retention.notice
        )
        checkpoints = CheckpointSync(self.home.jobs, self.cluster.inventory.get, identity)
        self._code = code = Code(self.home, self.store, self.cluster, identity)
        environments = Environments(self.store.environments, watch)
        self._python_envs = envs = PythonEnvService(self.home, self.store, self.cluster, code, identity)
        extra_env = environments.recording(checkpoint_env(checkpoints))
        planner = Planner(self.cluster, watch, extra_env, scheduler_input.facts, scheduler_input.modules, envs)
        outputs = OutputSync(self.home.jobs, self.cluster.inventory.get, identity, code.result_rules)
        collector = Collector(jobs, watch, logs, checkpoints, outputs, environments)
        self._result_service = ResultService(
            self.home.jobs, self.store, watch, collector, self.monitoring.measured, self.monitoring.energy.of
        )
        self.backups.may_remove = watch_clock.may_remove
        self._profiling = Profiling(self.home.jobs, jobs, watch, self.monitoring.energy)
        engine = self._engine = Engine(jobs, watch, planner, code, scheduler_input, collector)
        self._make_retention(engine, self._result_service)
        self._reconciler = Reconciler(jobs, watch, engine.safe_mode)
        self._reconciler.on_decided = scheduler_input.reports.look_at_all_again
        planner.measured = self.measured.latest_of
        self._make_hardware(engine, scheduler_input)
        self._make_services(engine, scheduler_input, logs, planner, ResultCache(jobs, environments, envs))
        self._inform_health(engine, watch)
        placed.live = engine.live.get
        return engine, scheduler_input

    def _make_retention(self, engine: Engine, results: ResultService) -> None:
        self._retention = Retention(
            self.home.jobs,
            self.store,
            self.monitoring.metrics,
            results,
            lambda: self.cluster.config.retention,
            self.clock_watch.may_remove,
        )
        self._retention.kept_environments = self.kept_environments.names
        self._retention.on_removed = self.monitoring.forget_jobs
        self._retention.is_paused = lambda: engine.safe_mode.is_on

    def _make_hardware(self, engine: Engine, scheduler_input: SchedulerInput) -> None:
        self._hardware = HardwareService(
            self.cluster, self.health, engine, scheduler_input.holds, self.measured, self._identity
        )
        scheduler_input.holds.on_change = engine.wake

    def _inform_health(self, engine: Engine, watch: RunTracker) -> None:
        self.health.speeds = self.measured.speeds
        self.health.ranks = partial(ranks_by, engine, watch)
        self.health.has_jobs = engine.live.has_jobs_on
        self.health.refusal = watch.refusal
        self.health.strange_runs = watch.strange

    def _make_services(
        self, engine: Engine, scheduler_input: SchedulerInput, logs: SmallLogs, planner: Planner, cache: ResultCache
    ) -> None:
        """What clients ask about jobs that are, and that may be."""
        jobs = self.store.jobs
        forecasts = Forecasts(self.store.trials, self.store.hardware, self.cluster, scheduler_input.facts)
        submitting = SubmissionReader(jobs, scheduler_input, self.cluster, self.code, cache, forecasts)
        submitting.envs = self._python_envs
        service = self._job_service = JobService(self.store, engine, scheduler_input, logs, planner, submitting)
        self._planning = PlanService(
            service, forecasts, Trials(self.home.jobs, self.store.trials, service, self.results)
        )
        self._sweeps = SweepService(self.store, service, engine.changed, self.monitoring, self.results)
        starting = Starting(self.cluster, service, self.python_envs, lambda: self.health.speeds(scheduler_input.gpus))
        self._ray_clusters = RayClusters(self.home.jobs, self.store, self.cluster, service, starting)

    def status(self, settings: Mapping[str, str] | None = None) -> AgentStatus:
        """``settings``: the UGRO_* variables of the command that asks."""
        nodes = list(self.cluster.inventory)
        error, damage = self.cluster.error, self.store.damage
        return AgentStatus(
            pid=os.getpid(),
            version=ugro.__version__,
            generation=self._identity.generation,
            started_at=self._started_at.isoformat(timespec="seconds"),
            home=str(self.home.path),
            cluster_file=str(self.cluster.path) if self.cluster.path else None,
            cluster_found=self.cluster.guard is not None,
            cluster_name=self.cluster.config.cluster.name,
            nodes=len(nodes),
            nodes_connected=sum(node.link is not None for node in nodes),
            running_commands=self._running_commands,
            config_error=str(error) if error else None,
            config_hint=error.hint if error else None,
            state_error=str(damage) if damage else None,
            state_hint=damage.hint if damage else None,
            last_backup=self.backups.last.made_at if self.backups.last else None,
            backup_problem=self.backups.problem,
            ignored_variables=() if settings is None else differing(os.environ, settings),
            safe_mode=self._engine.safe_mode.status() if self._engine else None,
        )

    @property
    def _running_commands(self) -> int:
        """What would end with the agent."""
        benches = self._hardware.running if self._hardware else 0
        return len(self._executions) + benches + self.tunnels.count

    async def use_cluster(self, file: ServedFile) -> None:
        await self.cluster.switch(file.path, self._guard(file))
        _remember(self.home, self.cluster)

    def stop(self, pid: int | None, *, only_if_idle: bool) -> None:
        """``pid``: the agent that the client means, because another may have replaced it."""
        if pid not in (None, os.getpid()):
            raise NotFound(f"agent {pid} has ended; this is {os.getpid()}")
        if only_if_idle and (busy_with := self.status().running_commands):
            raise NotAllowed(
                f"the agent is busy with {busy_with} running command(s)",
                hint="wait for them, or stop them and the agent: ugro agent stop",
            )
        self.stopping.set()

    # --- nodes -------------------------------------------------------------------------------------------------

    def reports(self, words: Sequence[str]) -> AsyncGenerator[list[NodeReport]]:
        return self.health.reports(self.cluster.inventory.select(words))

    async def best(self) -> Choice:
        choice = await self.health.best(max_age_s=self.cluster.config.health_check.refresh_interval)
        if choice is None:
            raise Unsatisfiable("no node can take work", hint="see: ugro health")
        return choice

    async def add_node(self, name: str, fields: Mapping[str, object]) -> None:
        path = self._cluster_file()
        text = read_text(path)
        await self._edit(path, add_node(text, name, fields, file=str(path)), text)

    async def remove_node(self, name: str) -> None:
        self.cluster.inventory.get(name)
        self.discovery.refuse_removal(name)
        path = self._cluster_file()
        text = read_text(path)
        await self._edit(path, remove_node(text, name, file=str(path)), text)
        await self.store.resume(name)
        await self.measured.forget(name)

    async def drain(self, name: str, reason: str) -> None:
        self.cluster.inventory.get(name)
        await self.store.drain(name, reason)

    async def resume(self, name: str) -> None:
        self.cluster.inventory.get(name)
        self.discovery.refuse_resume(name)
        await self.store.resume(name)

    # --- commands ----------------------------------------------------------------------------------------------

    async def execute(self, key: str, words: Sequence[str], command: Command) -> AsyncGenerator[bytes]:
        nodes = self.cluster.inventory.select(words)
        # A node that is connecting for the first time gets the time a connection may take.
        timeout_s = 2 * self.cluster.config.ssh.connect_timeout
        execution = self._executions[key] = Execution(nodes, command, timeout_s)
        try:
            async with contextlib.aclosing(execution.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            if self._executions.get(key) is execution:
                del self._executions[key]

    def cancel(self, key: str) -> None:
        if (execution := self._executions.get(key)) is None:
            raise NotFound("this command has ended already")
        execution.cancel()

    def cancel_all(self) -> None:
        self.monitoring.is_ending = True
        self.backups.end()
        if self._code is not None:
            self._code.end()
        if self._job_service is not None:
            self._job_service.end_streams()
        if self._sweeps is not None:
            self._sweeps.end_streams()
        if self._hardware is not None:
            self._hardware.cancel()
        self.tunnels.close_all()
        for execution in self._executions.values():
            execution.cancel()

    async def diagnose(self, words: Sequence[str]) -> AsyncGenerator[list[Finding]]:
        if (damage := self.store.damage) is not None:
            yield [Finding("agent", "state", Grade.FAILED, str(damage), damage.hint)]
        if (safe_mode := self.safe_mode.status()) is not None:
            yield [judge_state(safe_mode)]
        doctor = Doctor(self.cluster, self.health)
        nodes = self.cluster.inventory.select(words)
        async for finding in doctor.findings(nodes):
            yield [finding]
        if worse := [finding for node in nodes for finding in self.measured.findings(node.spec.name)]:
            yield worse
        if findings := [*self.clock_watch.findings(), *self.discovery.findings()]:
            yield findings

    # --- helpers -----------------------------------------------------------------------------------------------

    def _guard(self, file: ServedFile) -> Guard | None:
        return Guard(self.allowances, self.home.allowed_ssh_config) if file.is_found else None

    def _cluster_file(self) -> Path:
        path = self.cluster.path
        if path is None:
            raise ConfigError(
                "there is no cluster file to edit: this machine alone is the cluster",
                hint="write one from your hosts: ugro init",
            )
        return path

    async def _edit(self, path: Path, text: str, before: str) -> None:
        """Writes the file and applies it; restores it if it does not load."""
        if self.cluster.guard is not None:
            self.allowances.require(Effects.of(before, path))  # or the edit would allow what somebody else has edited
        keep_allowed(self.allowances, path, before, text)
        write_atomically(path, text)
        await self.cluster.look_again()
        if (error := self.cluster.error) is not None:
            write_atomically(path, before)
            await self.cluster.look_again()
            raise error


def _remember(home: StateDir, cluster: Cluster) -> None:
    """For the next agent, which a command in another folder may start."""
    links = home.served_cluster, home.served_found
    try:
        for link in links:
            link.unlink(missing_ok=True)
        if cluster.path is not None:
            links[cluster.guard is not None].symlink_to(cluster.path)
    except OSError as error:
        log.warning("the next agent will not know the cluster file: %s", error)
