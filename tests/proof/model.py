"""A world for the engine that has no time and no threads of its own: model nodes, and a clock that only a test moves.

The engine, its policy and the store are the real ones. What stands in are the parts that talk to machines: each keeps
the promises of the protocol (a start at most once, a fence, an end that is proven) and nothing more.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.proof.absent import ModelResults, NoCode
from tests.proof.modelnode import Key, ModelNode
from ugro.features.environments.model import Made
from ugro.features.power.model import OwnerReport
from ugro.kernel.agent.rules import Jump
from ugro.kernel.files.results.collector import Collector
from ugro.kernel.files.results.log_mirror import SmallLogs
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.plan import ranks_on
from ugro.kernel.jobs.engine.reconciler import Engine, Knowledge
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.run_tracker import Sighting
from ugro.kernel.jobs.engine.runs import Moment, RunStart, RunStatus
from ugro.kernel.jobs.engine.scheduler_input import Live
from ugro.kernel.jobs.model import Job, JobState, Share
from ugro.kernel.jobs.records import NodePlan, Plan, RankPlan
from ugro.kernel.jobs.scheduling.model import ClusterView, GpuView, Holding, NodeView
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.cluster import Inventory
from ugro.kernel.links.model import Machine
from ugro.kernel.links.node import Identity
from ugro.kernel.store.engine import Database, Opening, Work, _Request
from ugro.kernel.support import moments as machine
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import RemoteFailure, UgroError, Unreachable
from ugro.kernel.support.moments import Instant, Reading, place_s

T = TypeVar("T")
GPUS_OF_A_NODE = 2
_STATES = {"starting": RunState.STARTING, "running": RunState.RUNNING, "dead": RunState.DEAD}
_GIB = 1 << 30


class Clock(asyncio.SelectorEventLoop):
    """A loop whose timers are due when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:  # type: ignore[override]
        """No threads: the same steps in the same order each time."""
        done: asyncio.Future[T] = self.create_future()
        done.set_result(func(*args))
        return done


class InlineDatabase(Database):
    """The real one's transactions, in the caller's thread: others come before and after, and never in between."""

    is_dead = False

    async def open(self, opening: Opening | None = None) -> None:
        await self.run(self._backend.migrate)

    async def close(self) -> None:
        self._backend.close()

    async def run(
        self, work: Work[T], then: Callable[[T], None] | None = None, *, counts: bool = True
    ) -> T:
        await self._others()
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future())
        self._run_together([request])
        if then is not None and request.error is None:
            then(request.result)
        await self._others()
        if isinstance(request.error, sqlite3.DatabaseError):
            raise UgroError(str(request.error)) from request.error
        if request.error is not None:
            raise request.error
        return cast(T, request.result)

    async def _others(self) -> None:
        await asyncio.sleep(0)
        if self.is_dead:  # its process is gone: nobody is told anything
            raise asyncio.CancelledError


# --- the agent's side of them -----------------------------------------------------------------------------------


@dataclass
class Known:
    """What the agent last heard of a node."""

    seen: dict[Key, RunStatus] = field(default_factory=dict)
    closed: set[Key] = field(default_factory=set)
    is_open: bool = False
    has_answered: bool = False
    machine: Machine | None = None


class ModelRuns:
    def __init__(self, node: ModelNode, known: Known) -> None:
        self._node = node
        self._known = known

    async def start(self, orders: Sequence[RunStart]) -> list[RunStatus | RemoteFailure]:
        def start_all() -> list[RunStatus | RemoteFailure]:
            done: list[RunStatus | RemoteFailure] = []
            for order in orders:
                try:
                    done.append(self._start(order))
                except RemoteFailure as failure:
                    done.append(failure)
            return done

        return await self._call(start_all)

    async def remove(self, runs: Sequence[Key]) -> list[RemoteFailure | None]:
        def remove_all() -> list[RemoteFailure | None]:
            for key in runs:
                self._node.remove(key)
            return [None] * len(runs)

        return await self._call(remove_all)

    async def stop(self, job: int, attempt: int, reason: str, grace_s: float) -> RunStatus:
        return await self._call(lambda: self._node.stop((job, attempt)))

    async def start_again(self, job: int, attempt: int, rank: int, starts: int) -> None:
        await self._call(lambda: self._node.start_again((job, attempt), rank, starts))

    async def renew(self, as_of: Moment) -> Moment:
        return await self._call(lambda: as_of)

    def _start(self, order: RunStart) -> RunStatus:
        return self._node.start(order, [rank.rank for rank in order.plan.ranks] or [0])

    async def _call(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        if not self._node.is_reachable:
            raise Unreachable("no route", subject=self._node.name)
        self._known.machine = self._node.machine  # told when the link opens
        done = work()
        await asyncio.sleep(0)
        if not self._node.is_reachable or self._node.loses_answers:
            raise Unreachable("cut off", subject=self._node.name)
        return done


class ModelWatch:
    """As ``RunTracker``, told what nodes say by ``hear`` and by nothing else."""

    def __init__(self, nodes: dict[str, ModelNode]) -> None:
        self._nodes = nodes
        self.known = {name: Known() for name in nodes}
        self._tell: Callable[[], None] = lambda: None
        self.identity = Identity("agent", 1)
        self.inventory = Inventory(dict)  # of logins there are none

    def prove_by(self, prove: object) -> None:
        return

    def unheard(self) -> list[str]:
        return []

    def sightings(self) -> list[Sighting]:
        """No node keeps a mark: the state is never an older one here."""
        return []

    @property
    def count(self) -> int:
        return len(self._nodes)

    def hear(self, name: str) -> None:
        node, known = self._nodes[name], self.known[name]
        known.is_open = node.is_reachable
        if node.is_reachable:
            known.has_answered = True
            known.machine = node.machine
            known.seen = {key: run.status for key, run in node.runs.items()}
        self._tell()

    def forget(self, name: str) -> None:
        """The configuration leads the name elsewhere: nothing that was known counts there."""
        self.known[name] = Known()
        self._tell()

    def on_change(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def keep_up(self) -> None:
        return

    async def close(self) -> None:
        return

    def runs(self, node: str) -> ModelRuns:
        return ModelRuns(self._nodes[node], self.known[node])

    def can_be_asked(self, node: str) -> bool:
        return True

    def clock_offset_s(self, node: str) -> float:
        return 0.0

    def silent_s(self, node: str) -> float:
        return 0.0 if self.known[node].is_open else 60.0

    def silent(self) -> frozenset[str]:
        return frozenset(name for name, known in self.known.items() if not known.is_open)

    def moment(self, node: str) -> tuple[Moment, float] | None:
        known = self.known[node]
        return (Moment(known.machine.boot_id, 0.0), 0.0) if known.has_answered and known.machine else None

    def machine(self, node: str) -> Machine | None:
        return self.known[node].machine

    def is_elsewhere(self, share: Share) -> bool:
        machine = self.known[share.node].machine
        return machine is not None and not share.is_of(machine)

    def note_moment(self, node: str, moment: Moment) -> None:
        return

    def status(self, node: str, job: int, attempt: int) -> RunStatus | None:
        return self.known[node].seen.get((job, attempt))

    def others(self, known: Set[tuple[int, int]]) -> Iterator[tuple[str, RunStatus]]:
        for name, node in self.known.items():
            if node.is_open:
                yield from [(name, node.seen[key]) for key in node.seen.keys() - known]

    def state(self, node: str, job: int, attempt: int) -> NodeRun:
        return NodeRun(node, self._state(self.known[node], (job, attempt)), is_reachable=self.known[node].is_open)

    def is_ruled_out(self, node: str, job: int, attempt: int) -> bool:
        return (job, attempt) in self.known[node].closed

    def learn(self, node: str, status: RunStatus) -> None:
        known, key = self.known[node], (int(status.job), status.attempt)
        if status.status == "absent":
            known.closed.add(key)
        elif key not in known.seen or status.progress >= known.seen[key].progress:
            known.seen[key] = status

    def forget_on(self, node: str, job: int, attempt: int) -> None:
        self.known[node].seen.pop((job, attempt), None)
        self.known[node].closed.discard((job, attempt))

    @staticmethod
    def _state(known: Known, key: Key) -> RunState:
        if key in known.closed:
            return RunState.FAILED
        if not known.has_answered:
            return RunState.UNKNOWN
        status = known.seen.get(key)
        if status is None:
            return RunState.ABSENT
        if status.has_ended:
            return RunState.DONE if status.outcome == "succeeded" else RunState.FAILED
        return _STATES[status.status]


class ModelPlanner:
    """Plans that have to be recorded."""

    def known(self, job: Job) -> None:
        return None

    def moved_at(self, job: Job) -> float:
        return 0.0

    async def make(
        self, job: Job, environments: Mapping[str, Made], sdk: str | None = None
    ) -> tuple[Plan, tuple[str, ...]]:
        assert job.placement is not None
        return Plan(job.id, job.attempt, tuple(_node_plan(job, name) for name in job.placement.nodes)), ()

    def forget(self, job: Job) -> None:
        return


def _node_plan(job: Job, node: str) -> NodePlan:
    """Of an elastic job, ranks have numbers that are their own: nodes and the engine speak of each."""
    assert job.placement is not None
    numbers = () if job.spec.elastic.min_ranks is None else ranks_on(job.spec, job.placement, node)
    return NodePlan(node, tuple(RankPlan(rank, place, (), ()) for place, rank in enumerate(numbers)))


class ModelMirror:
    """Logs that are home at once."""

    def __init__(self) -> None:
        self.changed = ChangeSignal()

    def has_begun(self, job: int, attempt: int, ranks: Iterable[int]) -> bool:
        return False

    def is_following(self, key: tuple[int, int, int]) -> bool:
        return True

    def follow(self, node: str, key: tuple[int, int, int], placed: Instant) -> None:
        return

    async def unfollow(self, keys: Iterable[tuple[int, int, int]]) -> None:
        await asyncio.sleep(0)

    def keep(self, job: int, attempt: int, logs: Sequence[tuple[int, bytes]], ended_unix_s: float) -> None:
        return

    async def finish(self, job: int, attempt: int, ranks: Sequence[int], timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return True

    async def close(self) -> None:
        return


class ModelCheckpoints:
    """Of jobs that write none."""

    def follow(self, job: Job, nodes: Sequence[str]) -> None:
        return

    async def collect(self, job: Job, nodes: Sequence[str]) -> None:
        await asyncio.sleep(0)

    async def has_progressed(self, job: Job) -> bool:
        await asyncio.sleep(0)
        return False

    async def newest(self, job: int) -> None:
        return None

    async def drop_on(self, job: Job, nodes: Sequence[str]) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return ()

    async def close(self) -> None:
        return


class ModelClock:
    """Ahead of the machine's by as much as the test has let pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock_now(clock)

    def reading(self) -> Reading:
        return Reading(clock_now(self._clock), self._started)

    def listen(self, on_jump: Callable[[Jump], None]) -> None:
        return


def clock_now(clock: Clock) -> Instant:
    now = machine.now()
    return replace(now, wall_s=now.wall_s + clock.now_s, boot_s=now.boot_s + clock.now_s)


class NoOwners:
    """No machine has a rule about its owner."""

    def keep_up(self) -> None:
        return

    def heard(self) -> dict[str, OwnerReport]:
        return {}

    def report(self, node: str) -> OwnerReport | None:
        return None


class ModelInput:
    def __init__(self, watch: ModelWatch, clock: Clock) -> None:
        self._watch = watch
        self.clock = ModelClock(clock)
        self.owners = NoOwners()

    def start(self) -> None:
        return

    def ask(self, is_silent: object, missing: object) -> None:
        return

    def listen(self, on_news: Callable[[], None]) -> None:
        return

    async def close(self) -> None:
        return

    async def take(self, live: Live) -> ClusterView:
        return ClusterView(
            now=self.clock.reading().now.boot_s,
            nodes=tuple(_node_view(name, known.is_open) for name, known in self._watch.known.items()),
            holding=tuple(_holding(job, self.clock.reading()) for job in live.holding() if job.placement is not None),
        )


def _node_view(name: str, is_open: bool) -> NodeView:
    gpus = tuple(GpuView(index, "RTX 4070", 8 * _GIB) for index in range(GPUS_OF_A_NODE))
    return NodeView(name, 8, 32 * _GIB, gpus, unusable=None if is_open else "is unreachable")


def _holding(job: Job, by: Reading) -> Holding:
    assert job.placement is not None
    return Holding(
        job.id, job.user, job.spec.priority, job.placement, place_s(job.submitted, by),
        is_preemptible=job.spec.is_preemptible, is_stopping=job.state is JobState.STOPPING,
    )  # fmt: skip


# --- an agent ---------------------------------------------------------------------------------------------------


class ModelAgent:
    """A life of the agent, from its start to its being killed; the database's files and the nodes outlive it."""

    def __init__(self, path: Path, nodes: dict[str, ModelNode], clock: Clock) -> None:
        self.path = path
        self._database = InlineDatabase(path)
        self.jobs = JobStore(self._database)
        self.watch = ModelWatch(nodes)
        watch = cast(Any, self.watch)
        logs = SmallLogs(self.jobs, cast(Any, ModelMirror()))
        model_input = ModelInput(self.watch, clock)
        parts: tuple[Any, ...] = (
            Knowledge.of(self.jobs, LiveJobs(self.jobs, model_input.clock.reading), watch),
            ModelPlanner(),
            NoCode(),
            model_input,
            Collector(self.jobs, watch, logs, *cast(Any, (ModelCheckpoints(), ModelResults()))),
        )
        self.engine = Engine(self.jobs, *parts)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._database.open()
        self._task = asyncio.create_task(self.engine.run())

    async def kill(self, successor: Path) -> None:
        """What was on disk at this moment is all that is left, in ``successor``; nothing is done or said any more."""
        for suffix in ("", "-wal"):
            file = Path(f"{self.path}{suffix}")
            if file.exists():
                shutil.copy(file, f"{successor}{suffix}")
        self._database.is_dead = True
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.close()
