"""The state of our runs as nodes report it. The last report of a silent node is kept, and the node counts as silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Set

from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import Share
from ugro.core.node import Machine
from ugro.nodes.inventory import Inventory
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity, Moment, News, Runs, RunStatus
from ugro.policy.lifecycle.attempt import NodeRun, RunState

log = logging.getLogger(__name__)

_STATES = {"starting": RunState.STARTING, "running": RunState.RUNNING, "dead": RunState.DEAD}
_ANSWER_S = 10.0
_CONNECT_S = 3.0
_AGAIN_S = 0.5
_LONGEST_AGAIN_S = 5.0
# A link that breaks and reconnects within this time does not count as silent.
_SILENT_S = 3.0

Key = tuple[int, int]  # job and attempt


class RunTracker:
    def __init__(self, inventory: Inventory, identity: Identity) -> None:
        self._inventory = inventory
        self._identity = identity
        self._on_change: Callable[[], None] = lambda: None
        self._watches: dict[str, _NodeWatch] = {}

    def on_change(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def keep_up(self) -> None:
        """Watches the nodes that are in the cluster now, and stops watching the others."""
        nodes = {node.spec.name: node for node in self._inventory}
        for name, watch in list(self._watches.items()):
            if nodes.get(name) is not watch.node or watch.task.done():
                self._watches.pop(name).close()
        for name, node in nodes.items():
            if name not in self._watches:
                self._watches[name] = _NodeWatch(node, self._identity, lambda: self._on_change())

    async def close(self) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close()
        await asyncio.gather(*(watch.task for watch in watches.values()), return_exceptions=True)

    def runs(self, node: str) -> Runs:
        """Raises NotFound for a node that is no longer part of the cluster."""
        return Runs(self._inventory.get(node), self._identity, _CONNECT_S, _ANSWER_S)

    def clock_offset_s(self, node: str) -> float:
        with contextlib.suppress(NotFound):
            return self._inventory.get(node).quality.clock_offset_s or 0.0
        return 0.0

    @property
    def count(self) -> int:
        """How many nodes the cluster has."""
        return len(self._watches)

    def is_member(self, node: str) -> bool:
        return node in self._watches

    def is_elsewhere(self, share: Share) -> bool:
        """Whether the node's name now refers to another machine or folder than the one that gave this share."""
        watch = self._watches.get(share.node)
        return watch is not None and watch.node.machine is not None and not share.is_of(watch.node.machine)

    def machine(self, node: str) -> Machine | None:
        watch = self._watches.get(node)
        return watch.node.machine if watch else None

    def silent_s(self, node: str) -> float:
        """For how long a node has been silent; infinite for one that is not in this cluster."""
        watch = self._watches.get(node)
        return watch.silent_s if watch else float("inf")

    def moment(self, node: str) -> tuple[Moment, float] | None:
        """The latest known time of a node's clock, and when it was received by our own."""
        watch = self._watches.get(node)
        return watch.moment if watch else None

    def status(self, node: str, job: int, attempt: int) -> RunStatus | None:
        watch = self._watches.get(node)
        return watch.seen.get((job, attempt)) if watch else None

    def others(self, known: Set[Key]) -> Iterator[tuple[str, RunStatus]]:
        """Every run on reachable nodes that is not among the known ones."""
        for name, watch in self._watches.items():
            if watch.is_open:
                yield from [(name, watch.seen[key]) for key in watch.seen.keys() - known]

    def state(self, node: str, job: int, attempt: int) -> NodeRun:
        watch = self._watches.get(node)
        if watch is None:
            return NodeRun(node, RunState.UNKNOWN, is_reachable=False)
        return NodeRun(node, watch.state((job, attempt)), is_reachable=watch.silent_s < _SILENT_S)

    def is_ruled_out(self, node: str, job: int, attempt: int) -> bool:
        """Whether the node has said that the run was never started there and never will be."""
        watch = self._watches.get(node)
        return watch is not None and (job, attempt) in watch.closed

    def learn(self, node: str, status: RunStatus) -> None:
        """Takes the answer to a call, which may arrive before or after the same status from the watch."""
        if (watch := self._watches.get(node)) is not None:
            watch.learn(status)

    def note_moment(self, node: str, moment: Moment) -> None:
        if (watch := self._watches.get(node)) is not None:
            watch.moment = (moment, boot_clock_s())

    def forget_on(self, node: str, job: int, attempt: int) -> None:
        if (watch := self._watches.get(node)) is not None:
            watch.forget((job, attempt))


class _NodeWatch:
    def __init__(self, node: Node, identity: Identity, on_change: Callable[[], None]) -> None:
        self.node = node
        self.seen: dict[Key, RunStatus] = {}
        self.closed: set[Key] = set()  # never started there, and never will be
        self.is_open = False
        self.moment: tuple[Moment, float] | None = None
        self._has_answered = False
        self._fresh: dict[Key, RunStatus] = {}  # a full list that is still being received
        self._silent_since = boot_clock_s()
        self._runs = Runs(node, identity, _CONNECT_S, _ANSWER_S)
        self._on_change = on_change
        self.task = asyncio.create_task(self._keep(), name=f"watch runs on {node.spec.name}")

    def close(self) -> None:
        self.task.cancel()

    @property
    def silent_s(self) -> float:
        return 0.0 if self.is_open else boot_clock_s() - self._silent_since

    def state(self, key: Key) -> RunState:
        if key in self.closed:
            return RunState.FAILED
        if not self._has_answered:
            return RunState.UNKNOWN
        status = self.seen.get(key)
        if status is None or (status.status == "dead" and not status.is_claimed):
            # Perhaps created, but nothing was started: asking for it again does no harm.
            return RunState.ABSENT
        if status.has_ended:
            return RunState.DONE if status.outcome == "succeeded" else RunState.FAILED
        return _STATES[status.status]

    def learn(self, status: RunStatus) -> None:
        key = (int(status.job), status.attempt)
        if status.status == "absent":
            self.closed.add(key)
            return
        for picture in (self.seen, self._fresh):
            known = picture.get(key)
            if known is None or status.progress >= known.progress:
                picture[key] = status

    def forget(self, key: Key) -> None:
        self.seen.pop(key, None)
        self._fresh.pop(key, None)
        self.closed.discard(key)

    async def _keep(self) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                async with contextlib.aclosing(self._runs.watch()) as news:
                    async for piece in news:
                        self._receive(piece)
                        pause_s = _AGAIN_S
            except (Unreachable, TimedOut):
                pass
            except RemoteFailure as error:
                log.error("cannot watch runs: %s", error, extra={"node": self.node.spec.name})
            finally:
                self._fall_silent()
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_AGAIN_S, pause_s * 2)

    def _receive(self, news: News) -> None:
        self.moment = (news.now, boot_clock_s())
        for status in news.runs:
            if status.job.isdigit():
                self.learn(status)
        for name in news.gone:
            job, _, attempt = name.rpartition(".")
            if job.isdigit() and attempt.isdigit():
                self.seen.pop((int(job), int(attempt)), None)
        if news.is_first and not news.has_more:
            self.seen = self._fresh
            self.is_open = self._has_answered = True
        if self.is_open:
            self._on_change()

    def _fall_silent(self) -> None:
        if self.is_open:
            self._silent_since = boot_clock_s()
        self.is_open = False
        self._fresh = {}
        # Waiters look again when it counts as silent.
        asyncio.get_running_loop().call_later(_SILENT_S, self._on_change)


def boot_clock_s() -> float:
    """A clock that also runs while this machine sleeps, as leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
