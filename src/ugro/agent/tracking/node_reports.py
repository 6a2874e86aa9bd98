"""The latest report of every node, refreshed in the background. Reading them never waits for a node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.agent.tracking.node_modules import NodeModules
from ugro.core.errors import UgroError
from ugro.core.job import HOLDING_STATES
from ugro.core.node import Facts, NodeReport
from ugro.nodes.node import Node
from ugro.policy.nodes.gpu_changes import gpu_changes
from ugro.store.jobs import JobStore

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
Pace = Callable[[Node], float | None]
_Holders = dict[str, frozenset[str]]  # by node, the ids of jobs


class NodeReports:
    def __init__(self, jobs: JobStore, cluster: Cluster, health: HealthCheck) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._health = health
        self.on_news: Callable[[], None] | None = None
        self.modules = NodeModules()
        self.modules.on_news = self._tell
        self.on_reports: Callable[[list[NodeReport]], None] | None = None
        # After how many seconds a node is asked again; None: not until its link is back.
        self.pace: Pace = lambda node: None if node.link is None else _REFRESH_S
        # By node and not by name: a node whose address has changed may be another machine.
        self._seen: WeakKeyDictionary[Node, Seen] = WeakKeyDictionary()
        self._first_asked: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        self._asking: set[Node] = set()
        self._wanted: set[str] = set()  # names of nodes to be asked now, whatever is known
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

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
        if self.on_reports is not None:
            self.on_reports(list(reports))
        self._tell()

    def _tell(self) -> None:
        if self.on_news is not None:
            self.on_news()

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
