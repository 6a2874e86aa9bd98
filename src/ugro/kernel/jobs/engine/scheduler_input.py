"""The scheduler's view of the cluster: nodes by their latest reports, and what running jobs hold.

Taking a view asks no node, so a slow or dead one delays nobody: reports are made in the background.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from ugro.features.environments.service.installed import NodeModules
from ugro.features.power.owners import Owners, owners_of
from ugro.features.quotas.usage_book import UsageBook
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.clock import Clock
from ugro.kernel.jobs.model import ALL_NODES, Job, JobSpec, JobState, Launcher, Placement, Resources
from ugro.kernel.jobs.records import gpu_part
from ugro.kernel.jobs.scheduling.demand import Need, alternatives, names_in
from ugro.kernel.jobs.scheduling.fit import Makes, Misfit, Wanted, check_fits, needs_of
from ugro.kernel.jobs.scheduling.model import (
    Asleep,
    ClusterView,
    GpuView,
    Holding,
    NodeView,
    NoLogin,
    Waiting,
    with_named,
)
from ugro.kernel.jobs.scheduling.queue import WaitingJobs
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import LASTING_CAUSES
from ugro.kernel.links.model import Facts, Gpu, Limits, Machine, NodeSpec, Status
from ugro.kernel.links.node import Node
from ugro.kernel.links.reports import HealthCheck, NodeReports, Pace, Seen, usual_pace
from ugro.kernel.links.rules import Candidate, best_node, drained_machines, lack_of_room
from ugro.kernel.support.errors import NotAllowed
from ugro.kernel.support.moments import Reading, due_s, place_s

# --- nodes that take no new jobs for a while --------------------------------------------------------------------------
# They are being measured, for example. This is in memory only: an agent that is killed holds no node, and what it did
# there ends with its link.


class Holds:
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._reasons: dict[str, str] = {}
        self._on_change = on_change

    def reason(self, node: str) -> str | None:
        """As words after its name: "is being measured"."""
        return self._reasons.get(node)

    @contextmanager
    def hold(self, nodes: Sequence[str], reason: str) -> Iterator[None]:
        """All of them or none."""
        if taken := [node for node in nodes if node in self._reasons]:
            raise NotAllowed(self._reasons[taken[0]], subject=taken[0], hint="wait until that is over")
        self._reasons |= dict.fromkeys(nodes, reason)
        self._on_change()
        try:
            yield
        finally:
            for node in nodes:
                del self._reasons[node]
            self._on_change()


# --- the view ---------------------------------------------------------------------------------------------------------


# How long a submission that fits no known node waits for nodes that have not reported yet.
_FIRST_ANSWERS_S = 5.0

_GPUS_AGE_S = 0.5
_GPUS_S = 3.0  # how long a submission waits for nodes that do not answer
_FIRST_MODULES_S = 2.0  # the same for a submission whose script imports something


class Live(Protocol):
    """The jobs that have not ended."""

    queue: WaitingJobs
    released: int  # how often a job gave its devices back

    def holding(self) -> Sequence[Job]: ...


class Sleeping(NamedTuple):
    """A node that is not awake: what it is, from the time when it was."""

    asleep: Asleep
    refusal: str | None  # why it is not woken now, as words after its name
    machine: Machine | None
    facts: Facts | None


# Of these users, those whose jobs cannot start on a node; and whether it sleeps.
MissingLogins = Callable[[Node, Iterable[str], bool], tuple[NoLogin, ...]]


async def _at_once() -> None:
    """Nobody else is about to join."""


@dataclass(frozen=True, slots=True)
class Standings:
    """What others know of nodes, and what decides with it which of them get jobs."""

    clock: Clock
    owners: Owners
    pace: Pace = usual_pace
    sleeping: Callable[[str], Sleeping | None] = lambda node: None
    # Waits a little for machines that may be about to join.
    settled: Callable[[], Awaitable[None]] = _at_once


class SchedulerInput:
    def __init__(
        self, jobs: JobStore, cluster: Cluster, health: HealthCheck, standings: Standings | None = None
    ) -> None:
        known = standings if standings is not None else Standings(Clock(), owners_of(cluster, jobs))
        self._jobs = jobs
        self._cluster = cluster
        self._health = health
        self._listeners: list[Callable[[], None]] = []
        self.holds = Holds(self._tell)
        self.usage = UsageBook(jobs.usage, cluster)
        self.reports = NodeReports(jobs, cluster, health, known.pace, self._tell)
        self.owners = known.owners
        self.clock = known.clock
        self._sleeping, self._settled = known.sleeping, known.settled
        # Whether a node is silent about its runs: a job that was placed there would count as lost.
        self.is_silent: Callable[[str], bool] = lambda node: False
        # Whose jobs cannot start on a node, because there they run in accounts of their users.
        self.missing_logins: MissingLogins = lambda node, users, is_asleep: ()
        self._users: tuple[str, ...] = ()  # whose jobs wait
        self._fitting: set[tuple[Resources, bool]] = set()
        self._fitting_on: list[Seen] = []
        self._views: WeakKeyDictionary[Node, tuple[object, NodeView]] = WeakKeyDictionary()
        self.owners.listen(self._note_owner)
        # Made once and not in every pass, for as long as a job stays as it is.
        self._holding: dict[int, tuple[object, Holding]] = {}

    def start(self) -> None:
        """Starts asking nodes."""
        self.reports.start()

    def ask(self, is_silent: Callable[[str], bool], missing: MissingLogins) -> None:
        """Who knows of runs: which nodes are silent about theirs, and whose jobs cannot start on a node."""
        self.is_silent, self.missing_logins = is_silent, missing

    def listen(self, on_news: Callable[[], None]) -> None:
        """``on_news`` is called whenever something is known of a node that may change what can start."""
        self._listeners.append(on_news)

    def _tell(self) -> None:
        for on_news in self._listeners:
            on_news()

    def _note_owner(self, node: str) -> None:
        self.reports.look_again(node)  # for those who look at reports
        self._tell()

    async def close(self) -> None:
        await self.owners.close()
        await self.reports.close()

    async def take(self, live: Live) -> ClusterView:
        """The view for a pass over ``live.queue``, and as new as that queue when this returns."""
        if unknown := live.queue.unknown_jobs():
            for number, state in (await self._jobs.states_of(unknown)).items():
                live.queue.learn(number, state)
        for line in live.queue.lines:
            self.modules.want(line.kind.imports)
        self._users = tuple(sorted({line.user for line in live.queue.lines}))
        drained = await self._health.drained()
        await self._read_usage(live)
        # Nothing is awaited from here on, so that waiting and holding jobs and what was used are consistent.
        self._holding = {job.id: self._holding_view(job) for job in live.holding() if job.placement is not None}
        held = tuple(view for _, view in self._holding.values())
        now = self.clock.reading().now
        return ClusterView(now.boot_s, self._nodes(held, drained), holding=held, accounts=self.usage.accounts(now))

    async def _read_usage(self, live: Live) -> None:
        """Who has used what. If one user alone has jobs that wait, that changes nothing."""
        await self.usage.keep_up({*self._users, *(job.user for job in live.holding())})
        if not self.usage.quotas and len({line.user for line in live.queue.lines}) < 2:
            return
        while self.usage.seen != live.released:  # what a job used is on the books when it has given its devices back
            seen = live.released
            await self.usage.read(self.clock.reading().now)
            self.usage.seen = seen

    async def refresh_gpus(self, specs: Iterable[JobSpec]) -> None:
        """Before jobs that use GPUs are placed: idle nodes are asked rarely, and a GPU may have vanished since."""
        if any(way.gpus_per_node for spec in specs for way in alternatives(spec.resources)):
            await self.reports.refresh(_GPUS_AGE_S, _GPUS_S)

    async def misfit(self, spec: JobSpec) -> Misfit | None:
        """Why the job can never run here; None if it can. May wait for nodes that have not reported yet."""
        is_single = spec.launcher is Launcher.COMMAND
        if self._is_known_to_fit(spec.resources, is_single):
            return None
        nodes = self._distinct(await self._health.drained())
        known = [node for node in nodes if node.is_known]
        if known and check_fits(spec.resources, known, on_one_node=is_single) is None:
            self._fitting.add((spec.resources, is_single))
            return None
        await self._settled()
        await self.first_answers()
        nodes = self._distinct(await self._health.drained())
        return check_fits(spec.resources, nodes, on_one_node=is_single)

    @property
    def modules(self) -> NodeModules:
        return self.reports.modules

    async def learn_imports(self, spec: JobSpec) -> None:
        """Finds out which nodes lack what its script imports. Takes no time if that is known."""
        wanted = spec.node_imports
        if not wanted.names:
            return
        await self.first_answers(_FIRST_MODULES_S)
        await self.modules.learn(wanted.names, self._cluster.inventory)

    async def import_note(self, spec: JobSpec) -> str | None:
        """Who has what its script imports, if some lack it."""
        return next((need.import_note for need in await self.needs(spec) if need.import_note), None)

    async def needs(self, spec: JobSpec) -> list[Need]:
        """Its alternatives on these nodes."""
        nodes = with_named(self._nodes((), await self._health.drained()), names_in(spec.resources))
        wanted = Wanted(spec.node_imports.names, spec.node_imports.is_certain)
        return list(needs_of(spec.resources, spec.launcher is Launcher.COMMAND, Makes(nodes), wanted))

    async def possible_needs(self, spec: JobSpec) -> list[Need]:
        """Those of them that the nodes could give if they were idle; all, if that is not known."""
        needs = await self.needs(spec)
        nodes = self._distinct(await self._health.drained())
        is_single = spec.launcher is Launcher.COMMAND
        return [need for need in needs if check_fits(need.resources, nodes, on_one_node=is_single) is None] or needs

    async def with_all_nodes(self, spec: JobSpec, way: Resources) -> Resources:
        """The same with a number of nodes for ``all``: those that can take the job, whatever runs there now.

        A job that leaves GPUs open gets all nodes with GPUs, or all nodes if none has any.
        """
        if way.min_nodes != ALL_NODES:
            return way
        await self._settled()
        await self.first_answers()
        usable = [node for node in self._distinct(await self._health.drained()) if node.unusable is None]
        makes, one = Makes(with_named(tuple(usable), names_in(way))), replace(way, min_nodes=1, max_nodes=1)
        need = next(iter(needs_of(one, spec.launcher is Launcher.COMMAND, makes)))
        count = max(1, makes.count(need))
        return replace(way, min_nodes=count, max_nodes=count)

    async def most_ranks(self, spec: JobSpec) -> int | None:
        """How many ranks it could have here, at most; None if that is not known of all nodes."""
        nodes = self._distinct(await self._health.drained())
        if not all(node.is_known for node in nodes):
            return None
        most_gpus = max((len(node.gpus) for node in nodes), default=0)
        needs = await self.possible_needs(spec)
        each = (most_gpus if need.wants_all_gpus else need.least_gpus for need in needs)
        return max(need.max_nodes * max(1, gpus) for need, gpus in zip(needs, each, strict=True))

    async def first_answers(self, timeout_s: float = _FIRST_ANSWERS_S) -> None:
        """Waits until every node has answered or failed to, at most ``timeout_s``."""
        await self.reports.first_answers(timeout_s)

    def _is_known_to_fit(self, resources: Resources, is_single: bool) -> bool:
        """A cache: most jobs that are submitted together have the same demand."""
        seen = [self.reports.of(node) for node in self._cluster.inventory]
        if seen != self._fitting_on:
            self._fitting_on, self._fitting = seen, set()
        return (resources, is_single) in self._fitting

    def facts(self, node: Node) -> Facts | None:
        """The facts of its last report."""
        return self.reports.of(node).facts

    def labels(self, node: str) -> tuple[str, ...]:
        return self._cluster.inventory.get(node).spec.labels

    def limits(self) -> dict[str, Limits]:
        """How each node holds jobs to what they ask for, where that is known."""
        known = ((node.spec.name, self.facts(node)) for node in self._cluster.inventory)
        return {name: facts.limits for name, facts in known if facts is not None and facts.limits is not None}

    def _distinct(self, drained: Mapping[str, str]) -> list[NodeView]:
        """Each machine once, whatever it does now."""
        return [node for node in self._nodes((), drained) if not node.is_second_name]

    def _nodes(self, holding: Sequence[Holding], drained: Mapping[str, str]) -> tuple[NodeView, ...]:
        self.reports.start()
        held: dict[str, dict[int, int]] = {}  # by node and job, in cores
        for holder in holding:
            for share in holder.placement.shares:
                held.setdefault(share.node, {})[holder.id] = share.cpus
        seconds = self._health.second_names(held.__contains__)
        drained = drained_machines(drained, seconds)
        owners = drained_machines(self.owners.objections(), seconds)
        speeds = self._health.notes.speeds(self.gpus)
        standings = {
            name: _Standing(
                drained.get(name),
                seconds.get(name),
                owners.get(name),
                self.holds.reason(name),
                speeds.get(name, 1.0),
                sleeping := self._sleeping(name),
                self.is_silent(name),
                self.missing_logins(node, self._users, sleeping is not None),
            )
            for name, node in ((node.spec.name, node) for node in self._cluster.inventory)
        }
        return tuple(self._node_view(node, standings[node.spec.name], held) for node in self._cluster.inventory)

    def gpus(self) -> dict[str, tuple[str, ...]]:
        """By node, where that is known: the GPUs that it has, by uuid."""
        known = ((node.spec.name, self.facts(node)) for node in self._cluster.inventory)
        return {name: tuple(gpu.uuid for gpu in facts.gpus) for name, facts in known if facts is not None}

    def _node_view(self, node: Node, standing: _Standing, held_by_all: dict[str, dict[int, int]]) -> NodeView:
        seen = self.reports.of(node)
        is_awaited = self.reports.awaits(node)
        # Where each user has a Python of their own, that of the node's entry says nothing about it.
        lacks = self.modules.lacking(node) if node.spec.account is None else frozenset()
        held = held_by_all.get(node.spec.name, {})
        key = (seen, node.spec, node.link is None, standing, is_awaited, tuple(held.items()), lacks)
        known = self._views.get(node)
        if known is not None and known[0] == key:
            return known[1]
        view = replace(self._view(node, seen, standing, held), is_awaited=is_awaited, lacks=lacks)
        self._views[node] = (key, view)
        return view

    def _view(self, node: Node, seen: Seen, standing: _Standing, held: dict[int, int]) -> NodeView:
        machine, facts = node.machine, seen.facts
        if (sleeping := standing.sleeping) is not None:
            machine, facts = machine or sleeping.machine, facts or sleeping.facts
        ours = {str(job) for job in held} | seen.jobs
        return NodeView(
            name=node.spec.name,
            cores=machine.cores if machine else 0,
            memory_bytes=machine.memory_total_bytes if machine else 0,
            gpus=tuple(_gpu(gpu, ours) for gpu in facts.gpus) if facts else _configured_gpus(node.spec),
            labels=node.spec.labels,
            speed=standing.speed,
            group=_subnet(node.spec.host if node.spec.transport == "ssh" else self._cluster.config.cluster.master_ip),
            unusable=_objection(node, seen, standing),
            is_second_name=standing.same_as is not None,
            no_room=lack_of_room(facts.root_disk) if facts else None,
            cost=self._cost(node, facts, sum(held.values())) if facts else 0.0,
            is_known=facts is not None and machine is not None,
            asleep=standing.sleeping.asleep if standing.sleeping else None,
            is_personal=node.spec.account is not None,
            no_login=standing.no_login,
        )

    def _cost(self, node: Node, facts: Facts, held_cores: int) -> float:
        """As for ``ugro health``, plus the assigned cores that the measured load does not show yet."""
        settings = self._cluster.config.health_check
        load = (max(facts.load[0], float(held_cores)), *facts.load[1:])
        cores = node.machine.cores if node.machine else None
        candidate = Candidate(node.spec.name, Status.HEALTHY, cores, replace(facts, load=load))
        choice = best_node([candidate], cpu_weight=settings.cpu_weight, gpu_weight=settings.gpu_weight)
        return choice.cost if choice else 0.0

    def _holding_view(self, job: Job) -> tuple[object, Holding]:
        key = (job.attempt, job.state, job.started_at)
        known = self._holding.get(job.id)
        return known if known is not None and known[0] == key else (key, _holding(job, self.clock.reading()))


class _Standing(NamedTuple):
    """What lasts of a node, whatever it reports."""

    drained: str | None  # the reason given
    same_as: str | None  # the name under which its machine is used
    owner: str | None = None  # that somebody uses it
    held: str | None = None  # why it takes no jobs for a short while
    speed: float = 1.0  # relative to the other nodes
    sleeping: Sleeping | None = None
    is_silent: bool = False
    no_login: tuple[NoLogin, ...] = ()

    @property
    def objection(self) -> str | None:
        """Why it takes no new jobs, as words after its name."""
        if self.same_as is not None:
            return f"is the same machine as {self.same_as}"
        if self.drained is not None:
            return f"is drained: {self.drained}" if self.drained else "is drained"
        if self.owner is not None:
            return self.owner
        return self.held


def _objection(node: Node, seen: Seen, standing: _Standing) -> str | None:
    """Why it takes no new jobs; lasting reasons come first."""
    if standing.objection is not None:
        return standing.objection
    if standing.sleeping is not None:  # None if it may be woken, whatever its last report says
        return standing.sleeping.refusal
    return _objection_now(node, seen, standing)


def _objection_now(node: Node, seen: Seen, standing: _Standing) -> str | None:
    if seen.report is None:
        return "has not answered yet"
    if node.link is None:
        # What stays until somebody mends it is named.
        what = f": {seen.report.error}" if seen.report.cause in LASTING_CAUSES else ""
        return f"is {Status.UNREACHABLE}{what}"
    if not seen.report.status.is_up or seen.report.status is Status.UNHEALTHY:
        return f"is {seen.report.status}"
    return "has not said yet what runs there" if standing.is_silent else None


def _gpu(gpu: Gpu, ours: set[str]) -> GpuView:
    return GpuView(
        index=gpu.index,
        model=gpu.name,
        memory_bytes=gpu.memory_total_bytes,
        # By job id: processes of another agent's jobs are marked by UGRO, too.
        is_foreign=gpu.holder is not None or any(process.job not in ours for process in gpu.processes),
        is_broken=gpu.error is not None,
        uuid=gpu.uuid,
        holder=str(gpu.holder) if gpu.holder else None,
    )


def _configured_gpus(spec: NodeSpec) -> tuple[GpuView, ...]:
    """The GPU named in the cluster file, until the node has reported its own."""
    return (GpuView(0, spec.gpu, spec.vram_bytes),) if spec.gpu else ()


def _subnet(address: str | None) -> str:
    """The subnet of a node's address; empty for one that is reached by name."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return ""
    return str(ipaddress.ip_network((found, 24 if found.version == 4 else 64), strict=False))


def waiting_view(job: Job, by: Reading) -> Waiting:
    pause = job.tries.pause
    return Waiting(
        id=job.id,
        user=job.user,
        spec=job.spec,
        submitted_at=place_s(job.submitted, by),
        state=job.state,
        attempt=job.attempt,
        not_before=due_s(*pause, by) if pause else None,
        avoid=(*map(node_of, job.tries.avoid), *job.spec.avoid),
    )


def _holding(job: Job, by: Reading) -> Holding:
    assert job.placement is not None
    return Holding(
        id=job.id,
        user=job.user,
        priority=job.spec.priority,
        placement=_on_nodes(job.placement),
        submitted_at=place_s(job.submitted, by),
        started_at=place_s(job.attempt_started, by) if job.attempt_started else None,
        time_limit_s=job.spec.time_limit_s,
        is_preemptible=job.spec.is_preemptible,
        is_stopping=job.state is JobState.STOPPING,
        gpu_part=gpu_part(job.spec.resources),
    )


def _on_nodes(placement: Placement) -> Placement:
    """Devices belong to nodes, not to logins."""
    if placement.nodes == placement.node_names:
        return placement
    return Placement(tuple(replace(share, node=node_of(share.node)) for share in placement.shares))
