"""The agent: the process that knows the cluster and decides. Every request of a client is a method here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import ugro
from ugro.features.discovery.service import Members
from ugro.features.exec.service import Executions
from ugro.features.hardware.service import MeasuredHardware
from ugro.features.health.operations import Diagnose
from ugro.features.health.rules import DiskRoom, judge_disk, judge_loop, judge_state
from ugro.features.health.service import Doctor
from ugro.features.retention.config import RetentionSection
from ugro.features.safe_mode.records import Comparison, Records
from ugro.features.safe_mode.service import begin, is_known_old
from ugro.kernel.access.model import Caller
from ugro.kernel.access.service import AuditLog, Team, Tokens
from ugro.kernel.agent.backups import Backups
from ugro.kernel.agent.clock import Clock, ClockWatch
from ugro.kernel.agent.loop_watch import LoopWatch
from ugro.kernel.agent.model import AgentStatus, DashboardLink, Finding, Grade, ServedFile
from ugro.kernel.agent.operations import (
    AddNode,
    CreateDashboardLink,
    DrainNode,
    GetAgentStatus,
    ReloadClusterFile,
    RemoveNode,
    ResumeNode,
    StopAgent,
    UseClusterFile,
)
from ugro.kernel.agent.wiring import Base, Parts, make_parts
from ugro.kernel.config.allowance import Allowances, Effects, keep_allowed
from ugro.kernel.config.edit import add_node, remove_node, write_atomically
from ugro.kernel.config.load import differing, read_text
from ugro.kernel.files.results.file_store import SPARE_BYTES
from ugro.kernel.jobs.model import FINAL_STATES, Ending, JobState
from ugro.kernel.links.cluster import Cluster, Guard
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.operations.request import answers
from ugro.kernel.store.address import locate
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import LEAST_BYTES, PIECE_BYTES, PIECES, Opening, Reserve
from ugro.kernel.support.errors import ConfigError, NotAllowed, NotFound, UgroError
from ugro.kernel.support.quantities import count_of, jobs
from ugro.kernel.support.state_dir import StateDir
from ugro.node import foreign

# --- the agent's other addresses --------------------------------------------------------------------------------------
# The agent is reached at its own socket, and at the dashboard, the HTTPS API and the team's socket. Callers may ask for
# the dashboard's address before it has opened. What serves them is elsewhere.


_OPEN_S = 20.0


class DashboardAddress:
    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self._make: Callable[[str], DashboardLink] | None = None  # for a user
        self._problem: UgroError | None = None

    def opened(self, make: Callable[[str], DashboardLink]) -> None:
        self._make, self._problem = make, None
        self._is_settled.set()

    def closed(self, problem: UgroError) -> None:
        self._make, self._problem = None, problem
        self._is_settled.set()

    @answers(CreateDashboardLink)
    async def link(self, asked: CreateDashboardLink, caller: Caller) -> DashboardLink:
        """That signs a browser in as this user."""
        try:
            await asyncio.wait_for(self._is_settled.wait(), _OPEN_S)
        except TimeoutError:
            raise NotAllowed("the dashboard has not opened", hint="see: ugro agent logs") from None
        if self._make is None:
            raise self._problem or NotAllowed("the dashboard is closed")
        return self._make(caller.user)


class OpenAddress:
    """An address that is open, or why it is not; neither, if nobody asked for it."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.problem: UgroError | None = None

    def opened(self, url: str) -> None:
        self.url, self.problem = url, None

    def closed(self, problem: UgroError | None) -> None:
        self.url, self.problem = None, problem

    @property
    def complaint(self) -> str | None:
        if self.problem is None:
            return None
        return f"{self.problem.message}; {self.problem.hint}" if self.problem.hint else self.problem.message


# --- the disk of the state --------------------------------------------------------------------------------------------
# Keeps space for the state on the disk of the state directory, and says when the disk is full.


class StateDisk:
    def __init__(self, home: StateDir) -> None:
        self._home = home
        self.reserve = Reserve(home.reserve)

    def take_and_look(self) -> Finding | None:
        """Keeps space for the state again if there is some; what is wrong. Blocks."""
        self.reserve.take()
        return self.look()

    def look(self) -> Finding | None:
        """What is wrong; None if there is room for all."""
        try:
            free = self.reserve.free_bytes
        except OSError:  # the folder is gone, which others notice
            return None
        left, whole = self.reserve.bytes_left, PIECES * PIECE_BYTES
        return judge_disk(DiskRoom(str(self._home.path), free, left, whole, LEAST_BYTES, SPARE_BYTES))


# --- the agent --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Agent:
    def __init__(self, home: StateDir, cluster_file: ServedFile) -> None:
        self.home = home
        self.disk = StateDisk(home)
        self.store = Store(locate(home, _end_at_once), self.disk.reserve)
        self.allowances = Allowances(home)
        self.audit = AuditLog(self.store.audit)
        self._members = Members(self.store.discovered)
        self.cluster = cluster = Cluster(cluster_file.path, self._guard(cluster_file), self._members.specs)
        self.clock_watch = ClockWatch(Clock(), self.store, lambda: cluster.config.section(RetentionSection).notice)
        self.backups = Backups(home, self.store, self.clock_watch.may_remove)
        self.team = Team(self.cluster)
        self.tokens = Tokens(self.store.tokens)
        self.measured = MeasuredHardware(self.store.hardware)
        self.stopping = asyncio.Event()
        self.loop_watch = LoopWatch()
        self._started_at = datetime.now(UTC)
        self.executions = Executions(self.cluster)
        self.dashboard = DashboardAddress()
        self.api_address, self.team_address = OpenAddress(), OpenAddress()
        self._records: Records | None = None
        self._parts: Parts | None = None
        self._identity = Identity("", 0)

    async def start(self, on_progress: Callable[[str], None] = lambda text: None) -> None:
        await self.store.open(Opening(on_progress, self.backups.before_use))
        await asyncio.to_thread(self.disk.reserve.take)
        self._records = records = await asyncio.to_thread(Records, self.home)
        compared = await self._compare(records)
        identity = Identity(await self.store.agent_id(), await self._generation(compared), records.key)
        await self.tokens.load()
        await self._members.load()
        await self.cluster.start()
        _remember(self.home, self.cluster)
        self._identity = identity
        base = Base(
            self.home,
            self.store,
            self.cluster,
            self.clock_watch,
            self._members,
            self.measured,
            self.audit,
            self.disk.take_and_look,
            await self.store.logins.all(),
        )
        parts = make_parts(base, identity)
        self._take_up(parts)
        engine, monitoring = parts.engine, parts.monitoring
        await begin(engine.safe_mode, records, compared)
        self.store.jobs.keep_journal(engine.safe_mode.note)
        await self.clock_watch.start()
        await self.measured.read()
        await monitoring.open()
        monitoring.use_services(lambda: parts.services.listed(everything=False))
        monitoring.use_usage(parts.usage.all_time)
        parts.code.listen(monitoring.parts.prometheus.observe_sync)
        await parts.planning.end_left()
        await parts.sleepers.load()

    def _take_up(self, parts: Parts) -> None:
        """From here on the agent has its services."""
        self._parts = parts
        self.health, self.hosts, self.discovery = parts.health, parts.hosts, parts.discovery
        self.monitoring, self.tunnels = parts.monitoring, parts.tunnels
        self.kept_environments, self.python_envs = parts.kept_environments, parts.python_envs
        self.code, self.jobs, self.results = parts.code, parts.jobs, parts.results
        self.hardware, self.power, self.hooks, self.usage = parts.hardware, parts.power, parts.hooks, parts.usage
        self.sweeps, self.ray_clusters, self.services = parts.sweeps, parts.ray_clusters, parts.services

    async def _compare(self, records: Records) -> Comparison:
        """Before anything is changed: whether the state is the newest."""
        agent, numbers = await self.store.agent_id(), await self.store.jobs.standing.numbers()
        live = await self.store.jobs.in_states(frozenset(JobState) - FINAL_STATES)
        is_moved = await self.store.jobs.standing.is_elsewhere(records.place)
        return await asyncio.to_thread(partial(records.compare, agent, numbers, live, is_moved=is_moved))

    async def _generation(self, compared: Comparison) -> int:
        """A state that is known to be old keeps its own: nodes obey the newer one when that is put back instead."""
        if compared.reasons or await is_known_old(self.store.jobs):
            return (await self.store.jobs.standing.numbers()).generation
        return await self.store.next_generation()

    async def close(self) -> None:
        self.store.give_up()
        self.cancel_all()
        parts = self._parts
        if parts is not None:
            await parts.engine.close()
            await parts.monitoring.close()
            await parts.kept_environments.close()
            await parts.python_envs.close()
            await parts.code.close()
        await self.cluster.inventory.close()
        await self.audit.flush()
        await self.tokens.flush()
        await self.store.close()
        if self._records is not None:
            self._records.close()

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "the agent has not started"
        return self._parts

    @answers(GetAgentStatus)
    async def get_status(self, asked: GetAgentStatus, caller: Caller) -> AgentStatus:
        if asked.ugro_ssh_auth_sock is not None and caller.shares_account:
            self.cluster.remember_environment({"SSH_AUTH_SOCK": asked.ugro_ssh_auth_sock})
        return self.status(_settings(asked.ugro_settings))

    def status(self, settings: Mapping[str, str] | None = None) -> AgentStatus:
        """``settings``: the UGRO_* variables of the command that asks."""
        nodes = list(self.cluster.inventory)
        error, damage = self.cluster.error, self.store.damage or self.store.away
        full = self.disk.look()
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
            store=self.store.name,
            last_backup=self.backups.last.made_at if self.backups.last else None,
            backup_problem=self.backups.problem,
            disk_problem=full.text if full else None,
            disk_hint=full.remedy if full else None,
            ignored_variables=() if settings is None else differing(os.environ, settings),
            safe_mode=self.parts.engine.safe_mode.status() if self._parts else None,
            team_socket=self.team_address.url,
            team_problem=self.team_address.complaint,
            api_url=self.api_address.url,
            api_problem=self.api_address.complaint,
            stood_still=self.loop_watch.last,
        )

    @property
    def _running_commands(self) -> int:
        """What would end with the agent."""
        of_parts = self.hardware.running + self.tunnels.count if self._parts else 0
        return self.executions.count + of_parts

    @answers(UseClusterFile)
    async def use_cluster(self, asked: UseClusterFile, caller: Caller) -> None:
        file = ServedFile(Path(asked.path) if asked.path else None, is_found=asked.found)
        await self.cluster.switch(file.path, self._guard(file))
        _remember(self.home, self.cluster)

    @answers(ReloadClusterFile)
    async def reload_cluster(self, asked: ReloadClusterFile, caller: Caller) -> None:
        await self.cluster.look_again()

    @answers(StopAgent)
    async def stop(self, asked: StopAgent, caller: Caller) -> None:
        if asked.pid not in (None, os.getpid()):
            raise NotFound(f"agent {asked.pid} has ended; this is {os.getpid()}")
        if asked.only_if_idle and (busy_with := self.status().running_commands):
            raise NotAllowed(
                f"the agent is busy with {busy_with} running command(s)",
                hint="wait for them, or stop them and the agent: ugro agent stop",
            )
        self.stopping.set()

    # --- nodes -------------------------------------------------------------------------------------------------

    @answers(AddNode)
    async def add_node(self, asked: AddNode, caller: Caller) -> None:
        path = self._cluster_file()
        text = read_text(path)
        await self._edit(path, add_node(text, asked.name, asked.fields, file=str(path)), text)

    @answers(RemoveNode)
    async def remove_node(self, asked: RemoveNode, caller: Caller) -> None:
        name = asked.name
        self.cluster.inventory.named(name)
        self.discovery.refuse_removal(name)
        path = self._cluster_file()
        text = read_text(path)
        async with self.parts.engine.scheduling:  # no job is placed there meanwhile
            if asked.only_if_idle and (reason := await self.power.why_not_removed(name)) is not None:
                raise NotAllowed(f"it {reason}", subject=name, hint="try again later, or without --if-idle")
            if not asked.even_with_jobs:
                self._expect_no_jobs(name, caller)
            await self._edit(path, remove_node(text, name, file=str(path)), text)
        await self.store.resume(name)
        await self.measured.forget(name)

    def _expect_no_jobs(self, name: str, caller: Caller) -> None:
        """Raises NotAllowed if ranks are there that nobody has given up: they would go on unseen."""
        there = [job for job in self.parts.engine.live.on(name) if job.ending is not Ending.CANCELLED]
        if not there:
            return
        seen = [job.id for job in there if caller.may_see(job.user, is_private=job.spec.private)]
        which = jobs(seen) if len(seen) == len(there) else count_of(len(there), "job")
        end = f"end what is there: ugro cancel {' '.join(map(str, seen))}; " if seen else ""
        raise NotAllowed(
            f"{which} {'runs' if len(there) == 1 else 'run'} there",
            subject=name,
            hint=f"let it become empty: ugro node drain {name}; {end}"
            f"or let it go on there, unseen: ugro node rm {name} --force",
        )

    @answers(DrainNode)
    async def drain(self, asked: DrainNode, caller: Caller) -> None:
        self.cluster.inventory.named(asked.name)
        await self.store.drain(asked.name, asked.reason)

    @answers(ResumeNode)
    async def resume(self, asked: ResumeNode, caller: Caller) -> None:
        self.cluster.inventory.named(asked.name)
        self.discovery.refuse_resume(asked.name)
        await self.store.resume(asked.name)

    def cancel_all(self) -> None:
        self.backups.end()
        if self._parts is not None:
            self.monitoring.end_streams()
            self.tunnels.close_all()
            self.code.end()
            self.jobs.end_streams()
            self.sweeps.end_streams()
            self.services.end_streams()
            self.hardware.cancel()
        self.executions.end_all()

    @answers(Diagnose)
    async def diagnose(self, asked: Diagnose, caller: Caller) -> AsyncGenerator[list[Finding]]:
        return self._findings(self.cluster.inventory.select(asked.node))

    async def _findings(self, nodes: Sequence[Node]) -> AsyncGenerator[list[Finding]]:
        if (damage := self.store.damage or self.store.away) is not None:
            yield [Finding("agent", "state", Grade.FAILED, str(damage), damage.hint)]
        if self.store.away is not None:  # all else would wait for it
            return
        if (full := await asyncio.to_thread(self.disk.take_and_look)) is not None:
            yield [full]
        if (safe_mode := self.parts.engine.safe_mode.status()) is not None:
            yield [judge_state(safe_mode)]
        if (finding := self.team.finding()) is not None:
            yield [finding]
        if (stood := self.loop_watch.last) is not None:
            yield [judge_loop(stood)]
        doctor = Doctor(self.cluster, self.health)
        async for finding in doctor.findings(nodes):
            yield [finding]
        if worse := [finding for node in nodes for finding in self.measured.findings(node.spec.name)]:
            yield worse
        if findings := [*self.clock_watch.findings(), *self.discovery.findings(), *self.power.findings()]:
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


def _settings(header: str | None) -> Mapping[str, str] | None:
    """The UGRO_* variables of the client; None if it has sent none, as another program would."""
    try:
        found = foreign.parsed(header or "null")
    except ValueError:
        return None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None


def _end_at_once(error: UgroError) -> None:
    """The state is another agent's now."""
    log.error("%s", error)
    os._exit(1)  # nothing is closed: that agent may have begun already


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
