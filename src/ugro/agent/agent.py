"""The agent: the process that knows the cluster and decides. Every request of a client is a method here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
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
from ugro.agent.engine.planner import Planner
from ugro.agent.engine.reconciler import Engine
from ugro.agent.jobs.result_cache import ResultCache
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.retention import Retention
from ugro.agent.jobs.service import JobService
from ugro.agent.jobs.submission import SubmissionReader
from ugro.agent.monitoring.profiling import Profiling
from ugro.agent.monitoring.service import MonitoringService, ranks_by
from ugro.agent.ops import host_keys
from ugro.agent.ops.doctor import Doctor
from ugro.agent.ops.exec import Command, Execution
from ugro.agent.ops.hosts import host_spec
from ugro.agent.support.aio import keep_running
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.config.edit import add_node, remove_node, write_atomically
from ugro.config.environment import differing
from ugro.config.load import read_text
from ugro.core.agent import AgentStatus
from ugro.core.errors import ConfigError, NotAllowed, NotFound, Unreachable, Unsatisfiable, UsageError
from ugro.core.finding import Finding
from ugro.core.hostkey import HostKey
from ugro.core.node import NodeReport, NodeSpec
from ugro.core.support.state_dir import StateDir
from ugro.nodes.node import Dialling, Node
from ugro.nodes.runs import Identity
from ugro.policy.scheduling.selection import Choice
from ugro.store.database import Store

log = logging.getLogger(__name__)


class Agent:
    def __init__(self, home: StateDir, cluster_file: Path | None) -> None:
        self.home = home
        self.store = Store(home.database)
        self.cluster = Cluster(cluster_file)
        self.health = HealthCheck(self.cluster, self.store)
        self.stopping = asyncio.Event()
        self._generation = 0
        self._started_at = datetime.now(UTC)
        self._executions: dict[str, Execution] = {}
        self.dashboard = DashboardAddress()
        self.monitoring = MonitoringService(home, self.store, self.cluster)
        self._engine: Engine | None = None
        self._job_service: JobService | None = None
        self._code: Code | None = None
        self._result_service: ResultService | None = None
        self._profiling: Profiling | None = None
        self._retention: Retention | None = None

    async def start(self) -> None:
        await self.store.open()
        self._generation = await self.store.next_generation()
        await self.cluster.start()
        self._remember_cluster()
        engine, scheduler_input = self._make_engine(Identity(await self.store.agent_id(), self._generation))
        await self.monitoring.open(engine, scheduler_input)
        self.code.listen(self.monitoring.parts.prometheus.observe_sync)

    async def close(self) -> None:
        self.cancel_all()
        if self._engine is not None:
            await self._engine.close()
        await self.monitoring.close()
        if self._code is not None:
            await self._code.close()
        await self.cluster.inventory.close()
        await self.store.close()

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
    def code(self) -> Code:
        assert self._code is not None, "the agent has not started"
        return self._code

    async def run_jobs(self) -> None:
        assert self._engine is not None, "the agent has not started"
        await self._engine.run()

    async def run_retention(self) -> None:
        assert self._retention is not None, "the agent has not started"
        await keep_running(self._retention.run)

    def _make_engine(self, identity: Identity) -> tuple[Engine, SchedulerInput]:
        jobs = self.store.jobs
        watch = RunTracker(self.cluster.inventory, identity)
        logs = SmallLogs(jobs, LogMirror(self.home.jobs, watch))
        scheduler_input = SchedulerInput(jobs, self.cluster, self.health)
        checkpoints = CheckpointSync(self.home.jobs, self.cluster.inventory.get, identity)
        self._code = code = Code(self.home, self.store, self.cluster, identity)
        environments = Environments(self.store.environments, watch)
        extra_env = environments.recording(checkpoint_env(checkpoints))
        planner = Planner(self.cluster, watch, extra_env, scheduler_input.facts, scheduler_input.modules)
        outputs = OutputSync(self.home.jobs, self.cluster.inventory.get, identity, code.result_rules)
        collector = Collector(jobs, watch, logs, checkpoints, outputs, environments)
        self._result_service = ResultService(self.home.jobs, self.store, watch, collector, self.monitoring.measured)
        self._retention = Retention(
            self.home.jobs,
            self.store,
            self.monitoring.metrics,
            self._result_service,
            lambda: self.cluster.config.retention,
        )
        self._retention.on_removed = self.monitoring.forget_jobs
        self._profiling = Profiling(self.home.jobs, jobs, watch)
        engine = self._engine = Engine(jobs, watch, planner, code, scheduler_input, collector)
        submitting = SubmissionReader(jobs, scheduler_input, self.cluster, code, ResultCache(jobs, environments))
        self._job_service = JobService(self.store, engine, scheduler_input, logs, planner, submitting)
        self.health.ranks = partial(ranks_by, engine, watch)
        self.health.has_jobs = engine.live.has_jobs_on
        return engine, scheduler_input

    def status(self, settings: Mapping[str, str] | None = None) -> AgentStatus:
        """``settings``: the UGRO_* variables of the command that asks."""
        nodes = list(self.cluster.inventory)
        error = self.cluster.error
        return AgentStatus(
            pid=os.getpid(),
            version=ugro.__version__,
            generation=self._generation,
            started_at=self._started_at.isoformat(timespec="seconds"),
            home=str(self.home.path),
            cluster_file=str(self.cluster.path) if self.cluster.path else None,
            cluster_name=self.cluster.config.cluster.name,
            nodes=len(nodes),
            nodes_connected=sum(node.link is not None for node in nodes),
            running_commands=len(self._executions),
            config_error=str(error) if error else None,
            config_hint=error.hint if error else None,
            ignored_variables=() if settings is None else differing(os.environ, settings),
        )

    async def use_cluster(self, path: Path | None) -> None:
        await self.cluster.switch(path)
        self._remember_cluster()

    def stop(self, pid: int | None, *, only_if_idle: bool) -> None:
        """``pid``: the agent that the client means, because another may have replaced it."""
        if pid not in (None, os.getpid()):
            raise NotFound(f"agent {pid} has ended; this is {os.getpid()}")
        if only_if_idle and self._executions:
            raise NotAllowed(
                f"the agent is busy with {len(self._executions)} running command(s)",
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
        path = self._cluster_file()
        text = read_text(path)
        await self._edit(path, remove_node(text, name, file=str(path)), text)
        await self.store.resume(name)

    async def drain(self, name: str, reason: str) -> None:
        self.cluster.inventory.get(name)
        await self.store.drain(name, reason)

    async def resume(self, name: str) -> None:
        self.cluster.inventory.get(name)
        await self.store.resume(name)

    async def host_key(self, word: str, ssh_config: str | None = None) -> HostKey:
        """Of a node, or of another host that ssh finds by this word."""
        try:
            return await host_keys.look_up(self._way(word, ssh_config))
        except Unreachable as error:
            if error.cause == "name-not-found":
                self.cluster.inventory.get(word)  # if it is no node either: the nearest name is more helpful
            raise

    async def trust(
        self, word: str, fingerprints: tuple[str, ...], *, replace: bool, ssh_config: str | None = None
    ) -> HostKey:
        key = await host_keys.trust(self._way(word, ssh_config), fingerprints, replace=replace)
        for node in self.cluster.inventory:
            if node.link is None:  # it may be this host by another name, or behind it
                node.wake()
        return key

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
        if self._code is not None:
            self._code.end()
        if self._job_service is not None:
            self._job_service.end_streams()
        for execution in self._executions.values():
            execution.cancel()

    async def diagnose(self, words: Sequence[str]) -> AsyncGenerator[list[Finding]]:
        doctor = Doctor(self.cluster, self.health)
        async for finding in doctor.findings(self.cluster.inventory.select(words)):
            yield [finding]

    async def examine(self, specs: Sequence[NodeSpec], ssh_config: str | None) -> AsyncGenerator[list[NodeReport]]:
        """Probes hosts that are not (yet) part of the cluster."""
        dialling = self._dialling(ssh_config)
        nodes = [Node(spec, dialling) for spec in specs]
        try:
            # A first connection may take longer than a probe over an open link.
            timeout_s = 2 * self.cluster.config.ssh.connect_timeout + self.cluster.config.health_check.timeout
            async with contextlib.aclosing(self.health.reports(nodes, timeout_s=timeout_s)) as batches:
                async for reports in batches:
                    yield reports
        finally:
            await asyncio.gather(*(node.close() for node in nodes))

    # --- helpers -----------------------------------------------------------------------------------------------

    def _remember_cluster(self) -> None:
        """For the next agent, which a command in another folder may start."""
        link = self.home.served_cluster
        try:
            link.unlink(missing_ok=True)
            if self.cluster.path is not None:
                link.symlink_to(self.cluster.path)
        except OSError as error:
            log.warning("the next agent will not know the cluster file: %s", error)

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
        write_atomically(path, text)
        await self.cluster.look_again()
        if (error := self.cluster.error) is not None:
            write_atomically(path, before)
            await self.cluster.look_again()
            raise error

    def _way(self, word: str, ssh_config: str | None) -> host_keys.Way:
        node = self.cluster.inventory.find(word)
        spec = node.spec if node is not None else self._host(word)
        if spec.transport != "ssh":
            raise NotAllowed("is not reached by ssh and has no host key", subject=word)
        dialling = self._dialling(ssh_config)
        return host_keys.Way(spec, dialling.options, dialling.environment())

    def _host(self, word: str) -> NodeSpec:
        try:
            return host_spec(word, self.cluster.config.remote_root)
        except UsageError:
            return self.cluster.inventory.get(word).spec  # raises: it is no node either

    def _dialling(self, ssh_config: str | None) -> Dialling:
        dialling = self.cluster.inventory.dialling(self.cluster.config)
        if ssh_config is None:
            return dialling
        return replace(dialling, options=replace(dialling.options, config_file=ssh_config))
