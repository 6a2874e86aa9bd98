"""Health checks: probes over the open links, with the verdict of the health rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

from ugro.features.environments.service.installed import NodeModules
from ugro.features.health.rules_score import assess
from ugro.features.power.model import OwnerReport, PowerReport
from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.engine.rules.reported_run import StrangeRuns
from ugro.kernel.jobs.model import HOLDING_STATES
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.calls import asked
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import Choice, Facts, NodeReport, Status
from ugro.kernel.links.node import Node
from ugro.kernel.links.operations import CheckHealth, ChooseBestNode
from ugro.kernel.links.rules import (
    Candidate,
    Sighting,
    best_node,
    gpu_changes,
    second_names,
    with_other_holders,
)
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError, Unreachable, Unsatisfiable
from ugro.node.main import probe

GpusOfNodes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks our running jobs should have on a node, and how many its supervisors report alive."""

    expected: int = 0
    alive: int = 0


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """What others know of a node, beside what it says itself."""

    ranks: Callable[[str], Ranks] = lambda node: Ranks()
    refusal: Callable[[str], RemoteFailure | None] = lambda node: None  # why a node refuses this agent
    # Of nodes with these GPUs, by uuid: how fast each was measured to be.
    speeds: Callable[[Callable[[], GpusOfNodes]], Mapping[str, float]] = lambda gpus: {}
    has_jobs: Callable[[str], bool] = lambda node: False  # whether some of our jobs hold devices there
    owner: Callable[[str], OwnerReport | None] = lambda node: None  # who uses it besides us
    owners_changed: ChangeSignal = field(default_factory=ChangeSignal)
    power: Callable[[str], PowerReport | None] = lambda node: None  # whether it sleeps
    # The runs that it reports and that were never placed there.
    strange_runs: Callable[[str], StrangeRuns | None] = lambda node: None


_NO_NOTES = NodeNotes()


@dataclass(frozen=True, slots=True)
class _Probing:
    timeout_s: float
    patiently: bool


class HealthCheck:
    def __init__(self, cluster: Cluster, store: Store, notes: NodeNotes = _NO_NOTES) -> None:
        self._cluster = cluster
        self._store = store
        self.notes = notes
        # By node and not by name, so that a node that was changed or only examined leaves nothing behind.
        self._reports: WeakKeyDictionary[Node, tuple[float, NodeReport]] = WeakKeyDictionary()
        self._gpus: WeakKeyDictionary[Node, frozenset[str]] = WeakKeyDictionary()  # the UUIDs seen last
        self._agent_id: str | None = None

    async def reports(
        self, nodes: Iterable[Node], *, timeout_s: float | None = None, patiently: bool = False
    ) -> AsyncGenerator[list[NodeReport]]:
        """Reports as they arrive, in batches: a slow node does not delay the others.

        ``patiently``: nobody waits for them, and a node that is dialled rarely is not dialled for them.
        """
        drained = await self._store.drained()
        limit_s = timeout_s or self._cluster.config.health_check.timeout
        how = _Probing(limit_s, patiently)
        checks = {
            asyncio.create_task(self._check(node, drained.get(node.spec.name), how), name=f"check {node.spec.name}")
            for node in nodes
        }
        try:
            while checks:
                done, checks = await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)
                seconds = self.second_names()
                found = [check.result() for check in done]
                yield [replace(one, same_as=seconds.get(one.name), **self._noted(one.name)) for one in found]
        finally:
            for check in checks:
                check.cancel()

    @answers(CheckHealth)
    async def check(self, asked: CheckHealth, caller: Caller) -> AsyncGenerator[list[NodeReport]]:
        return self.reports(self._cluster.inventory.select(asked.node))

    @answers(ChooseBestNode)
    async def choose(self, asked: ChooseBestNode, caller: Caller) -> Choice:
        """The node with the lowest cost, from reports that are fresh enough."""
        settings = self._cluster.config.health_check
        reports = await self.recent(max_age_s=settings.refresh_interval)
        own = [report for report in reports if report.same_as is None]
        known = ((one.name, one.facts) for one in own)
        gpus = {name: tuple(gpu.uuid for gpu in facts.gpus) for name, facts in known if facts is not None}
        speeds = self.notes.speeds(lambda: gpus)
        candidates = [replace(Candidate.of(report), speed=speeds.get(report.name, 1.0)) for report in own]
        choice = best_node(candidates, cpu_weight=settings.cpu_weight, gpu_weight=settings.gpu_weight)
        if choice is None:
            raise Unsatisfiable("no node can take work", hint="see: ugro health")
        return choice

    async def recent(self, *, max_age_s: float) -> list[NodeReport]:
        """A report of every node; nodes whose last one is older are asked again."""
        nodes = list(self._cluster.inventory)
        async for _ in self.reports(node for node in nodes if not self._is_fresh(node, max_age_s)):
            pass
        drained = await self._store.drained()
        seconds = self.second_names()
        # A drain takes effect at once, however old the report is; so does an owner who came.
        return [
            replace(
                report,
                drained=drained.get(report.name),
                same_as=seconds.get(report.name),
                **self._noted(report.name),
            )
            for _, report in (self._reports[node] for node in nodes if node in self._reports)
        ]

    def _noted(self, name: str) -> dict[str, Any]:
        return {"owner": self.notes.owner(name), "power": self.notes.power(name)}

    def second_names(self, has_jobs: Callable[[str], bool] | None = None) -> dict[str, str]:
        """For each node that is another name for the machine of a node: the name under which that is used."""
        has_jobs = has_jobs or self.notes.has_jobs
        boots = Counter(node.machine.boot_id for node in self._cluster.inventory if node.machine is not None)
        return second_names([one for one in self.sightings(has_jobs) if boots[one.machine.boot_id] > 1])

    def sightings(self, has_jobs: Callable[[str], bool]) -> list[Sighting]:
        """Of the nodes that have answered at least once."""
        return [
            Sighting(
                node.spec.name,
                node.machine,
                self._gpus.get(node, frozenset()),
                has_jobs=has_jobs(node.spec.name),
                is_reachable=node.link is not None,
            )
            for node in self._cluster.inventory
            if node.machine is not None
        ]

    async def drained(self) -> dict[str, str]:
        """The drained nodes, and the reasons given."""
        return await self._store.drained()

    def _is_fresh(self, node: Node, max_age_s: float) -> bool:
        """Whether the report is recent enough and the node's link has not broken since."""
        checked_at, report = self._reports.get(node, (float("-inf"), None))
        has_changed = report is not None and (node.link is None) == report.status.is_up
        return not has_changed and time.monotonic() - checked_at <= max_age_s

    async def _check(self, node: Node, drained: str | None, how: _Probing) -> NodeReport:
        report = await self._report(node, drained, how)
        self._reports[node] = (time.monotonic(), report)
        return report

    async def _report(self, node: Node, drained: str | None, how: _Probing) -> NodeReport:
        spec = node.spec
        if (power := self.notes.power(spec.name)) is not None and not power.is_awake:
            return _asleep(node, power, drained)  # not dialled: that could wake it
        try:
            facts = await _probe(node, how)
            if (refusal := self.notes.refusal(spec.name)) is not None:
                raise refusal
        except (Unreachable, TimedOut, RemoteFailure) as error:
            return _unreachable(node, error, drained)
        quality = node.quality
        ranks = self.notes.ranks(spec.name)
        facts = replace(facts, rank_processes=ranks.alive)
        facts = with_other_holders(facts, await self._agent(), spec.name)
        if facts.gpu_error is None:
            self._gpus[node] = frozenset(gpu.uuid for gpu in facts.gpus if gpu.uuid)
        strange = self.notes.strange_runs(spec.name)
        verdict = assess(facts, quality, ranks_expected=ranks.expected, strange_runs=str(strange) if strange else None)
        return NodeReport(
            name=spec.name,
            status=verdict.status,
            score=verdict.score,
            reasons=verdict.reasons,
            checked_at=_now(),
            drained=drained,
            role=spec.role,
            labels=spec.labels,
            target=spec.target,
            found_by=spec.found_by,
            machine=node.machine,
            facts=facts,
            link=quality,
        )

    async def _agent(self) -> str:
        if self._agent_id is None:
            self._agent_id = await self._store.agent_id()
        return self._agent_id


async def _probe(node: Node, how: _Probing) -> Facts:
    timeout_s = how.timeout_s
    # A node that is connecting gets the time that a connection may take: only then is the cause of a failure known.
    link = await node.ready(max(timeout_s, node.dialling.options.connect_timeout_s + 1), patiently=how.patiently)
    # The GPU reader times out first, so that a hung driver does not cost the other facts.
    try:
        answer = await link.call(*asked(probe, gpu_timeout_s=timeout_s * 0.8), timeout_s=timeout_s)
    except TimedOut as error:
        hint = f"it hangs or is very busy (health_check.timeout sets the limit); look: ugro doctor {node.spec.name}"
        raise Unreachable(error.message, subject=node.spec.name, cause="timed-out", hint=hint) from error
    try:
        return decode(Facts, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid probe result: {error}", subject=node.spec.name) from error


def _unreachable(node: Node, error: UgroError, drained: str | None) -> NodeReport:
    return replace(
        _absent(node, Status.UNREACHABLE, 0, drained),
        since=node.since.isoformat(timespec="seconds") if node.since else None,
        error=error.message,
        hint=error.hint,
        cause=error.cause if isinstance(error, Unreachable) else error.kind.replace("_", "-"),
    )


def _asleep(node: Node, power: PowerReport, drained: str | None) -> NodeReport:
    """Nothing is wrong with it, as far as known."""
    return _absent(node, Status(power.state.value), 100, drained)


def _absent(node: Node, status: Status, score: int, drained: str | None) -> NodeReport:
    """Of a node that was not probed."""
    spec = node.spec
    return NodeReport(
        name=spec.name,
        status=status,
        score=score,
        checked_at=_now(),
        drained=drained,
        role=spec.role,
        labels=spec.labels,
        target=spec.target,
        found_by=spec.found_by,
        machine=node.machine,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- the latest report of every node ----------------------------------------------------------------------------------
# Reports are refreshed in the background. Reading them never waits for a node.


log = logging.getLogger(__name__)

_REFRESH_S = 5.0
_HELD_S = 1.0  # while somebody else has one of its GPUs: it may be free any moment
_LOOK_S = 0.25
# A node that cannot be reached at the first attempt often can at the second, and may have what a job needs.
_AWAITED_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What is known about a node. ``eq=False``: compared by identity."""

    report: NodeReport | None = None  # None: it has not answered yet
    facts: Facts | None = None  # from the last report that had them
    jobs: frozenset[str] = frozenset()  # the jobs that held devices on it just before it was asked
    at: float = float("-inf")  # monotonic seconds


_NOTHING = Seen()
Pace = Callable[[Node], float | None]  # after how many seconds a node is asked again; None: not until its link is back
_Holders = dict[str, frozenset[str]]  # by node, the ids of jobs


def usual_pace(node: Node) -> float | None:
    return None if node.link is None else _REFRESH_S


class NodeReports:
    def __init__(
        self, jobs: JobStore, cluster: Cluster, health: HealthCheck, pace: Pace, on_news: Callable[[], None]
    ) -> None:
        """``on_news`` is called whenever a report may change what can start."""
        self._jobs = jobs
        self._cluster = cluster
        self._health = health
        self._on_news = on_news
        self.modules = NodeModules(on_news)
        self._listeners: list[Callable[[list[NodeReport]], None]] = []
        self.pace = pace
        # By node and not by name: a node whose address has changed may be another machine.
        self._seen: WeakKeyDictionary[Node, Seen] = WeakKeyDictionary()
        self._first_asked: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        self._asking: set[Node] = set()
        self._wanted: set[str] = set()  # names of nodes to be asked now, whatever is known
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def listen(self, on_reports: Callable[[list[NodeReport]], None]) -> None:
        self._listeners.append(on_reports)

    def start(self) -> None:
        """Starts refreshing, or restarts it if a bug ended it."""
        if (self._task is None or self._task.done()) and not self._is_closed:
            self._task = asyncio.create_task(self._keep_asking(), name="keep reports fresh")
            self._task.add_done_callback(_note_end)

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def of(self, node: Node) -> Seen:
        return self._seen.get(node, _NOTHING)

    def look_again(self, name: str) -> None:
        """Something that was done there shows that its last report is no longer true."""
        self._wanted.add(name)

    def look_at_all_again(self) -> None:
        """Nodes that refused this agent obey it now, however long they were not to be asked."""
        self._wanted.update(node.spec.name for node in self._cluster.inventory)

    async def refresh(self, max_age_s: float, timeout_s: float) -> None:
        """Asks the nodes whose reports are older, and returns when they have answered, or after ``timeout_s``."""
        now = time.monotonic()
        nodes = [node for node in self._cluster.inventory if node.link is not None]
        old = [node for node in nodes if now - self.of(node).at > max_age_s]
        idle = [node for node in old if node not in self._asking]
        self._asking.update(idle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if idle:
                    await self._ask(idle)
                while self._asking.intersection(old):  # by others, who began before us
                    self._news.clear()
                    await self._news.wait()

    def awaits(self, node: Node) -> bool:
        """Whether its first report may still arrive soon."""
        now = time.monotonic()
        return self.of(node).facts is None and now - self._first_asked.get(node, now) < _AWAITED_S

    async def first_answers(self, timeout_s: float) -> None:
        """Waits until every node has answered or failed to, at most ``timeout_s``."""
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(self.of(node).report is None for node in self._cluster.inventory):
                    self._news.clear()
                    await self._news.wait()

    async def _keep_asking(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                due = [node for node in self._cluster.inventory if self._is_due(node)]
                if due:
                    self._asking.update(due)
                    for node in due:
                        self._wanted.discard(node.spec.name)
                        self._first_asked.setdefault(node, time.monotonic())
                    group.create_task(self._look_at(due), name=f"ask {len(due)} nodes")
                await asyncio.sleep(_LOOK_S)

    def _is_due(self, node: Node) -> bool:
        if node in self._asking:
            return False
        seen = self.of(node)
        if seen.report is None or node.spec.name in self._wanted:
            return True
        was_away = not seen.report.status.is_up
        if was_away and (node.alive_since or seen.at) > seen.at:
            return True
        pause_s = self.pace(node)
        if pause_s is not None and _is_held(seen):
            pause_s = min(pause_s, _HELD_S)
        return pause_s is not None and time.monotonic() - seen.at > pause_s

    async def _look_at(self, nodes: list[Node]) -> None:
        await self._ask(nodes)
        await self.modules.refresh(nodes)

    async def _ask(self, nodes: list[Node]) -> None:
        try:
            holders = await self._holders()
            by_name = {node.spec.name: node for node in nodes}
            async with contextlib.aclosing(self._health.reports(nodes, patiently=True)) as batches:
                async for reports in batches:
                    changes = self._gpu_changes(reports, by_name)
                    self._note(reports, by_name, holders)
                    for name, text in changes:
                        await self._jobs.note("gpu", text, node=name)
        except UgroError as error:
            log.error("cannot probe nodes: %s", error)
        finally:
            self._asking.difference_update(nodes)

    def _gpu_changes(self, reports: Iterable[NodeReport], by_name: dict[str, Node]) -> list[tuple[str, str]]:
        seen = [(report, self.of(by_name[report.name]).facts) for report in reports]
        known = [(report.name, before, report.facts) for report, before in seen if before and report.facts]
        return [(name, text) for name, before, now in known for text in gpu_changes(before, now)]

    def _note(self, reports: Iterable[NodeReport], by_name: dict[str, Node], holders: _Holders) -> None:
        for report in reports:
            node = by_name[report.name]
            facts = report.facts or self.of(node).facts
            jobs = holders.get(report.name, frozenset())
            self._seen[node] = Seen(report, facts, jobs, time.monotonic())
            self._asking.discard(node)
        self._news.set()
        for on_reports in self._listeners:
            on_reports(list(reports))
        self._on_news()

    async def _holders(self) -> _Holders:
        found: dict[str, set[str]] = {}
        for job in await self._jobs.in_states(HOLDING_STATES):
            for name in job.placement.node_names if job.placement else ():
                found.setdefault(name, set()).add(str(job.id))
        return {name: frozenset(jobs) for name, jobs in found.items()}


def _is_held(seen: Seen) -> bool:
    return seen.facts is not None and any(gpu.holder is not None for gpu in seen.facts.gpus)


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()) is not None:
        log.error("node reports are no longer refreshed", exc_info=bug)
