"""The state of our runs as nodes report it. The last report of a silent node is kept, and the node counts as silent.

A node is believed about the runs that were placed on it, and about no others (``placed_runs``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.jobs.engine.placed_runs import PlacedRuns, Prove
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.rules.reported_run import Belief, StrangeRuns, run_number
from ugro.kernel.jobs.engine.runs import Moment, News, Runs, RunStatus
from ugro.kernel.jobs.model import Share
from ugro.kernel.links.cluster import Inventory
from ugro.kernel.links.model import Machine
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import boot_clock_s

log = logging.getLogger(__name__)

_STATES = {"starting": RunState.STARTING, "running": RunState.RUNNING, "dead": RunState.DEAD}
_ANSWER_S = 10.0
_CONNECT_S = 3.0
_AGAIN_S = 0.5
_LONGEST_AGAIN_S = 5.0
# A link that breaks and reconnects within this time does not count as silent.
_SILENT_S = 3.0
# From a node that was silent for this long, nothing is expected any more.
_AWAY_S = 600.0
# Of what is not placed on a node, no more is kept in memory.
_MOST_LEFTOVER = 1000  # runs of jobs that were removed; the others follow with the next connection
_MOST_UNPROVEN = 100
_MOST_STRANGE = 1000  # names of runs; the others are only counted

# A directory of accounts may fail for a moment. What is refused for longer counts as taken away.
_REFUSED_S = 60.0

_REFUSES_AGENT = "fenced-agent"

Key = tuple[int, int]  # job and attempt


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a node keeps of us, or that it refuses us: it has met a newer generation of this agent, or says so."""

    node: str
    has_answered: bool
    mark: str | None = None
    refusal: RemoteFailure | None = None


class RunTracker:
    def __init__(self, inventory: Inventory, identity: Identity, placed: PlacedRuns) -> None:
        self.inventory = inventory
        self.identity = identity
        self._placed = placed
        self._on_change: Callable[[], None] = lambda: None
        self._watches: dict[str, _NodeWatch] = {}

    def on_change(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def keep_up(self) -> None:
        """Watches the nodes and logins that are in the cluster now, and stops watching the others."""
        nodes = {node.spec.name: node for node in self._reached()}
        for name, watch in list(self._watches.items()):
            if nodes.get(name) is not watch.node or watch.task.done():
                self._watches.pop(name).close()
        for name, node in nodes.items():
            if name not in self._watches:
                self._watches[name] = _NodeWatch(node, self.identity, self._placed, lambda: self._on_change())

    def _reached(self) -> tuple[Node, ...]:
        return (*self.inventory, *self.inventory.logins)

    async def close(self) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close()
        await asyncio.gather(*(watch.task for watch in watches.values()), return_exceptions=True)

    def runs(self, node: str) -> Runs:
        """Raises NotFound for a node that is no longer part of the cluster."""
        return Runs(self.inventory.get(node), self.identity, _CONNECT_S, _ANSWER_S)

    def speak(self) -> None:
        """Tells every node program that this agent lives; called by another thread while the loop stands still."""
        for watch in list(self._watches.values()):
            if (link := watch.node.link) is not None:
                link.speak()

    def sightings(self) -> list[Sighting]:
        """Of every node and login of the cluster."""
        names = [node.spec.name for node in self._reached()]
        watches = ((name, self._watches.get(name)) for name in names)
        return [watch.sighting if watch else Sighting(name, has_answered=False) for name, watch in watches]

    def unheard(self) -> list[str]:
        """Nodes that have neither said what they run nor turned out to be unreachable."""
        silent = {one.node for one in self.sightings() if not one.has_answered}
        return [node.spec.name for node in self._reached() if node.spec.name in silent and node.error is None]

    def uncollected(self, unkept: Set[str]) -> set[str]:
        """Nodes that have something to collect, or have not said yet; without those that were silent for long.

        ``unkept``: nodes on which there may be checkpoints to fetch.
        """
        near = {name: watch for name, watch in self._watches.items() if watch.silent_s < _AWAY_S}
        found = {name for name, watch in near.items() if watch.seen or name in unkept}.union(self.unheard())
        # Of a login that is closed, or that nobody has opened yet, the node answers.
        found |= {name for name in unkept if name not in self._watches and node_of(name) in near}
        return {node_of(name) for name in found}

    def refusal(self, node: str) -> RemoteFailure | None:
        watch = self._watches.get(node)
        return watch.sighting.refusal if watch else None

    def prove_by(self, prove: Prove) -> None:
        """``prove`` is asked about runs that our records do not explain."""
        self._placed.prove = prove

    def ask_again(self) -> None:
        """Our generation has changed, or what was placed where: every node says once more what it has."""
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close()
        self._on_change()

    def clock_offset_s(self, node: str) -> float:
        with contextlib.suppress(NotFound):
            return self.inventory.get(node).quality.clock_offset_s or 0.0
        return 0.0

    @property
    def count(self) -> int:
        """How many nodes the cluster has."""
        return sum(not account_of(name) for name in self._watches)

    def can_be_asked(self, node: str) -> bool:
        """Whether it is in the cluster. Not a login that was taken away: its node answers, and refuses it."""
        return node in self._watches and not self.is_refused(node)

    def is_refused(self, login: str) -> bool:
        """Whether the node answers, and lets nobody in by this login: for a while, not just at the last attempt."""
        node, base = self.inventory.opened_login(login), self.inventory.find(node_of(login))
        if node is None or base is None or base.link is None:
            return False
        return node.denied_s >= _REFUSED_S

    def has_no_account(self, login: str) -> bool:
        """It was never used, or had nothing of a job when it was closed, and is refused."""
        return login not in self.inventory.known_logins.unclear and self.is_refused(login)

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

    def silent(self) -> frozenset[str]:
        """Nodes that do not say what runs there. Their links may be open again: they are asked after a pause."""
        return frozenset(name for name, watch in self._watches.items() if watch.silent_s >= _SILENT_S)

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

    def has_runs(self, node: str) -> bool:
        """Whether there is something to collect, or may be: one that is silent does not say what it has."""
        watch = self._watches.get(node)
        return watch is None or bool(watch.seen) or not watch.is_open

    def strange(self, node: str) -> StrangeRuns | None:
        """The runs that it reports and that were never placed there."""
        watch = self._watches.get(node)
        return watch.strange if watch else None

    def learn(self, node: str, status: RunStatus) -> RunStatus | None:
        """Takes the answer to a call, which may arrive before or after the same status from the watch.

        Returns what of it is believed; None: nothing.
        """
        watch = self._watches.get(node)
        return watch.learn(status) if watch is not None else None

    def note_moment(self, node: str, moment: Moment) -> None:
        if (watch := self._watches.get(node)) is not None:
            watch.moment = (moment, boot_clock_s())

    def forget_on(self, node: str, job: int, attempt: int) -> None:
        if (watch := self._watches.get(node)) is not None:
            watch.forget((job, attempt))


class _NodeWatch:
    def __init__(self, node: Node, identity: Identity, placed: PlacedRuns, on_change: Callable[[], None]) -> None:
        self.node = node
        self.seen: dict[Key, RunStatus] = {}
        self.closed: set[Key] = set()  # never started there, and never will be
        self.is_open = False
        self.moment: tuple[Moment, float] | None = None
        self.strange: StrangeRuns | None = None
        self._has_answered = False
        self.sighting = Sighting(node.spec.name, has_answered=False)
        self._fresh: dict[Key, RunStatus] = {}  # a full list that is still being received
        self._believed = _Believed(node, placed)
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

    def learn(self, status: RunStatus) -> RunStatus | None:
        key = _key(status)
        ranks = self._believed.ranks(key) if key is not None else None
        if key is None or ranks is None:
            return None
        status = status.of_ranks(ranks)
        if status.status == "absent":
            self.closed.add(key)
            return status
        for picture in (self.seen, self._fresh):
            known = picture.get(key)
            if known is None or (status.progress, status.changes) >= (known.progress, known.changes):
                picture[key] = status
        return status

    def forget(self, key: Key) -> None:
        self.seen.pop(key, None)
        self._fresh.pop(key, None)
        self.closed.discard(key)
        self._believed.forget(key)

    async def _keep(self) -> None:
        pause_s = _AGAIN_S
        complaint = ""
        while True:
            try:
                async with contextlib.aclosing(self._runs.watch()) as news:
                    async for piece in news:
                        await self._receive(piece)
                        pause_s = _AGAIN_S
            except (Unreachable, TimedOut):
                pass
            except UgroError as error:
                if complaint != str(error):  # each once: it is tried again and again
                    complaint = str(error)
                    log.error("cannot watch runs: %s", error, extra={"node": self.node.spec.name})
                if isinstance(error, RemoteFailure) and error.cause == _REFUSES_AGENT:
                    await self._note_refusal(error)
            finally:
                self._fall_silent()
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_AGAIN_S, pause_s * 2)

    async def _note_refusal(self, error: RemoteFailure) -> None:
        """Whether the node has met a newer generation of us, only our own mark there can prove."""
        with contextlib.suppress(UgroError):
            mark = await self._runs.mark()
            self.sighting = Sighting(self.node.spec.name, has_answered=True, mark=mark, refusal=error)
            self._on_change()

    async def _receive(self, news: News) -> None:
        self.moment = (news.now, boot_clock_s())
        await self._believed.sort(news)
        believed = [status for status in news.runs if self.learn(status) is not None]
        for name in news.gone:
            self._believed.note_gone(name)
            if (key := _parsed(name)) is not None:
                self.seen.pop(key, None)
        if news.is_first and not news.has_more:
            self.seen = self._fresh
            self.is_open = self._has_answered = True
            self.sighting = Sighting(self.node.spec.name, has_answered=True, mark=news.mark)
        if self.is_open:
            await self._believed.report()
            self.strange = self._believed.strange
            if believed or news.gone or news.is_first:
                self._on_change()

    def _fall_silent(self) -> None:
        if self.is_open:
            self._silent_since = boot_clock_s()
        self.is_open = False
        self._fresh = {}
        self._believed = self._believed.emptied()
        # Waiters look again when it counts as silent.
        asyncio.get_running_loop().call_later(_SILENT_S, self._on_change)


class _Believed:
    """Of one connection to a node: which of the runs that it reports are believed, and which are not."""

    def __init__(self, node: Node, placed: PlacedRuns) -> None:
        self._node = node
        self._placed = placed
        self._ranks: dict[Key, range] = {}  # of the believed ones; none of those of jobs that were removed
        self._leftover: set[Key] = set()
        self._strange: dict[str, str] = {}  # by the run's name, why
        self._unnamed = 0  # how many more

    def emptied(self) -> _Believed:
        return _Believed(self._node, self._placed)

    @property
    def strange(self) -> StrangeRuns | None:
        count = len(self._strange) + self._unnamed
        return StrangeRuns(count, next(iter(self._strange.values()), "too many to be named")) if count else None

    def ranks(self, key: Key) -> range | None:
        """That were placed there; None: the run is not believed."""
        if key not in self._ranks:
            known = self._placed.known(self._node.spec.name, self._node.machine, key)
            if known is None or known.belief is not Belief.PLACED:
                return None
            self._ranks[key] = known.ranks
        return self._ranks[key]

    def forget(self, key: Key) -> None:
        self._ranks.pop(key, None)
        self._leftover.discard(key)

    def note_gone(self, name: str) -> None:
        key = _parsed(name)
        is_known = self._strange.pop(name, None) is not None or key in self._ranks
        self._strange.pop(f"ranks of {name}", None)
        self._unnamed -= bool(self._unnamed and not is_known)
        if key is not None:
            self.forget(key)

    async def sort(self, news: News) -> None:
        """Takes at most half of the time: one that reports without end must not keep the database busy."""
        unknown = {key: status for status in news.runs if (key := _key(status)) and self.ranks(key) is None}
        if unknown:
            began = time.monotonic()
            await self._look_up(unknown)
            await asyncio.sleep(time.monotonic() - began)
        for status in news.runs:
            self._check(status)
        for reason in news.invalid:
            self._note_strange(reason, reason)

    def _check(self, status: RunStatus) -> None:
        key = _key(status)
        if key is None:
            self._note_strange(status.name, f"{status.name!r:.40} is no name of a run")
        elif key in self._ranks and key not in self._leftover and status.of_ranks(self._ranks[key]) is not status:
            self._note_strange(f"ranks of {status.name}", f"it was not given all those ranks of job {key[0]}")

    async def _look_up(self, statuses: dict[Key, RunStatus]) -> None:
        # A node that has reported many runs without a ticket of ours is not asked for more.
        may_prove = len(self._strange) < _MOST_UNPROVEN
        found = await self._placed.sort(self._node.spec.name, self._node.machine, statuses, may_prove=may_prove)
        for key, one in found.items():
            if one.belief is Belief.STRANGE:
                self._note_strange(statuses[key].name, one.reason)
            elif one.belief is Belief.PLACED:
                self._ranks[key] = one.ranks
            elif one.belief is Belief.LEFTOVER and len(self._leftover) < _MOST_LEFTOVER:
                self._leftover.add(key)
                self._ranks[key] = one.ranks

    def _note_strange(self, name: str, reason: str) -> None:
        if name in self._strange or len(self._strange) < _MOST_STRANGE:
            self._strange[name] = reason
        else:
            self._unnamed += 1

    async def report(self) -> None:
        if (strange := self.strange) is not None:
            await self._placed.report(self._node.spec.name, strange)


def _key(status: RunStatus) -> Key | None:
    job = run_number(status.job)
    return (job, status.attempt) if job is not None else None


def _parsed(name: str) -> Key | None:
    job, _, attempt = name.rpartition(".")
    found = (run_number(job), run_number(attempt))
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None
