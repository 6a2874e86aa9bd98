"""Leases: a job that may be restarted elsewhere runs on a node only as long as we keep saying that we are there.

A renewal gives back an instant that the node reported, so one that comes late renews no more than that instant. We take
a silent node's part for dead only when its own clock must have ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from ugro.kernel.jobs.engine.plan import ranks_on
from ugro.kernel.jobs.engine.rules import attempt as standing
from ugro.kernel.jobs.engine.rules.attempt import ElasticView, NodeRun, RankState, RankView, Rejoin, RunState
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Moment, RankRecord, RunStatus
from ugro.kernel.jobs.model import Job, JobState, OnLost
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.kernel.support.moments import boot_clock_s

# --- trainings that go on without lost ranks --------------------------------------------------------------------------
# What their nodes say of each rank is told to the others and acted upon.


log = logging.getLogger(__name__)

EVENT = "elastic"
_AGAIN_S = 1.0
_GOING_ON = frozenset({JobState.RUNNING, JobState.UNREACHABLE})

Key = tuple[int, int]


class ElasticRuns:
    def __init__(self, jobs: JobStore, watch: RunTracker) -> None:
        self._jobs = jobs
        self._watch = watch
        self._told: dict[Key, str | None] = {}  # what the event log says of attempts
        self._lost_at: dict[tuple[int, int, int, int], float] = {}  # by rank and how often that was started

    def view(self, job: Job, runs: Sequence[NodeRun]) -> ElasticView | None:
        elastic = job.spec.elastic
        if elastic.min_ranks is None or job.placement is None:
            return None
        ranks = tuple(one for run in runs for one in self._ranks(job, run))
        return ElasticView(elastic.min_ranks, elastic.rejoins, ranks, self._members(job, ranks))

    def news(self, job: Job, view: ElasticView | None) -> Awaitable[None] | None:
        """The event to record, if something has changed."""
        if view is None or job.state not in _GOING_ON or view.among(RankState.UNHEARD):
            return None
        return self._tell(job, standing.described(view))

    def forget_all_but(self, under_way: set[Key]) -> None:
        self._told = {key: text for key, text in self._told.items() if key in under_way}
        self._lost_at = {key: at for key, at in self._lost_at.items() if key[:2] in under_way}

    async def rejoin(self, job: Job, wanted: Rejoin) -> None:
        """Ordered until the node says that it has started: an order that comes twice is one."""
        try:
            await self._watch.runs(wanted.node).start_again(job.id, job.attempt, wanted.rank, wanted.starts)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            more = {"job": job.id, "node": wanted.node}
            log.warning("rank %d cannot be started again yet: %s", wanted.rank, error, extra=more)
        await asyncio.sleep(_AGAIN_S)

    def _tell(self, job: Job, text: str | None) -> Awaitable[None] | None:
        key = (job.id, job.attempt)
        before, self._told[key] = self._told.get(key), text
        if text == before:
            return None
        return self._note(job, text or "every rank trains again")

    async def _note(self, job: Job, text: str) -> None:
        """An agent before us may have told it."""
        last = [one for one in await self._jobs.events(job=job.id, limit=100_000) if one.kind == EVENT]
        if not last or (last[-1].attempt, last[-1].text) != (job.attempt, text):
            await self._jobs.note(EVENT, text, job=job)

    # --- each rank ----------------------------------------------------------------------------------------------

    def _ranks(self, job: Job, run: NodeRun) -> Iterator[RankView]:
        assert job.placement is not None
        status = self._watch.status(run.node, job.id, job.attempt)
        for rank in ranks_on(job.spec, job.placement, run.node):
            yield self._rank(job, run, rank, status)

    def _rank(self, job: Job, run: NodeRun, rank: int, status: RunStatus | None) -> RankView:
        if status is not None and status.has_ended:
            return _ended(run.node, rank, next((one for one in status.ranks if one.rank == rank), None))
        if run.is_gone:
            return RankView(rank, run.node, RankState.LOST, "its node is lost")
        if not run.is_reachable or run.state is RunState.UNKNOWN:
            is_unheard = run.node in self._watch.unheard()
            return RankView(rank, run.node, RankState.UNHEARD if is_unheard else RankState.UNKNOWN)
        if run.state in _WHY:
            return RankView(rank, run.node, RankState.LOST, _WHY[run.state])
        lost = next((one for one in (status.lost if status else ()) if one.rank == rank), None)
        if lost is None:
            starts = 1 + max((key[3] for key in self._lost_at if key[:3] == (job.id, job.attempt, rank)), default=0)
            return RankView(rank, run.node, RankState.RUNNING, starts=starts)
        now = asyncio.get_running_loop().time()
        lost_s = now - self._lost_at.setdefault((job.id, job.attempt, rank, lost.starts), now)
        return RankView(rank, run.node, RankState.LOST, _how(lost), lost.starts, can_start=True, lost_s=lost_s)

    def _members(self, job: Job, ranks: Sequence[RankView]) -> frozenset[int]:
        nodes = {one.rank: one.node for one in ranks}
        said = {node: self._watch.status(node, job.id, job.attempt) for node in set(nodes.values())}
        groups = {node: (one.group, one.members) for node, one in said.items() if one is not None and one.members}
        return standing.members(groups, nodes)


def _ended(node: str, rank: int, record: RankRecord | None) -> RankView:
    if record is None:
        return RankView(rank, node, RankState.LOST, "how it ended is not known")
    if record.code == 0:
        return RankView(rank, node, RankState.DONE)
    return RankView(rank, node, RankState.LOST, _how(record))


def _how(record: RankRecord) -> str:
    if record.is_oom:
        return "out of memory"
    return f"signal {record.signal}" if record.signal is not None else f"exit code {record.code}"


_WHY = {
    RunState.ABSENT: "its node knows nothing of it any more",
    RunState.DEAD: "its supervisor is gone",
    RunState.FAILED: "it did not start",
}


# --- leases -----------------------------------------------------------------------------------------------------------


Place = tuple[str, str | None]  # a node, and its folder: the configuration may lead the name elsewhere

_LOOK_S = 0.5
_LONGEST_INTERVAL_S = 5.0
_CLOCK_DRIFT = 1.01
# Supervisor and reaper look five times a second, the reaper kills 2 s after the grace (``node/runs/reaper.py``), and
# a machine under load is slow.
_MARGIN_S = 10.0


def lease_s(job: Job) -> float | None:
    """None: silence never ends it, and it is not started elsewhere without proof."""
    disconnect = job.spec.disconnect
    return disconnect.lost_after_s if disconnect.on_lost is OnLost.RESTART else None


def dead_after_s(lease_s: float, grace_s: float) -> float:
    """From the last renewal until the node must have killed a run, if its clock is slower than ours, too."""
    return (lease_s + grace_s) * _CLOCK_DRIFT + _MARGIN_S


class Leases:
    def __init__(self, watch: RunTracker) -> None:
        self._watch = watch
        # By our clock: when we heard the instant we last gave back. What an agent before us gave back was older.
        self._since_s = boot_clock_s()
        self._vouched: dict[Place, float] = {}
        self._vouching = threading.Lock()
        self._due: dict[str, float] = {}  # by node, the time between two renewals; replaced, never changed
        self._renewed: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keeping: asyncio.Task[None] | None = None

    def start(self, holding: Callable[[], Iterable[Job]]) -> None:
        """Apart from all else: whatever becomes of that, what runs must not end for want of our word."""
        self._keeping = asyncio.create_task(self._keep(holding), name="renew leases")

    async def _keep(self, holding: Callable[[], Iterable[Job]]) -> None:
        while True:
            pause_s = _LOOK_S
            try:
                pause_s = min(_LOOK_S, self._renew_due(holding()) / 2)
            except Exception:  # the top of a daemon's loop
                log.exception("leases are not renewed")
            await asyncio.sleep(pause_s)

    def _renew_due(self, holding: Iterable[Job]) -> float:
        """Returns the shortest time between two renewals."""
        intervals: dict[str, float] = {}
        for job in holding:
            limit_s = lease_s(job)
            for share in job.placement.shares if job.placement and limit_s is not None else ():
                assert limit_s is not None
                if not self._watch.is_elsewhere(share):
                    intervals[share.node] = min(intervals.get(share.node, _LONGEST_INTERVAL_S), limit_s / 5)
        self._due = intervals
        now = boot_clock_s()
        for node, interval_s in intervals.items():
            if now - self._renewed.get(node, 0.0) >= interval_s * 0.9 and node not in self._tasks:
                self._renewed[node] = now
                self._begin(node)
        return min(intervals.values(), default=_LONGEST_INTERVAL_S)

    def speak(self) -> None:
        """Renews without the loop, from a thread that watches it, while it stands still.

        No new instant of a node's clock is heard meanwhile. The one that we know is moved on by the time that has
        passed here, less what its clock may lag behind ours: the node has surely reached it.
        """
        self._watch.speak()
        for node in self._due:
            known = self._watch.moment(node)
            if known is not None:
                now = boot_clock_s()
                self._vouch(node, now)
                with contextlib.suppress(NotFound):
                    self._watch.runs(node).renew_unheard(known[0].later((now - known[1]) / _CLOCK_DRIFT))

    async def begin(self, job: Job, node: str) -> Moment | None:
        """The instant that a start refers to. From it on the lease counts, on the node and here."""
        limit_s = lease_s(job)
        if limit_s is None:
            return None
        known = self._watch.moment(node)
        if known is None or boot_clock_s() - known[1] > limit_s / 5:
            await self._renew(node)
            known = self._watch.moment(node)
        if known is None or boot_clock_s() - known[1] > limit_s / 2:
            raise Unreachable("it has not reported its clock lately", subject=node, cause="silent")
        self._vouch(node, known[1])
        # From now on it is renewed without the loop, too, should that stand still before its next look at leases.
        self._due = {**self._due, node: min(self._due.get(node, _LONGEST_INTERVAL_S), limit_s / 5)}
        return known[0]

    def is_over(self, job: Job, node: str) -> bool:
        """The node has ended its part by itself by now, if it lives at all."""
        limit_s = lease_s(job)
        if limit_s is None or job.placement is None:
            return False
        share = job.placement.on(node)
        if self._watch.silent_s(node) == 0.0 and not self._watch.is_elsewhere(share):
            return False
        vouched_s = max(self._since_s, self._vouched.get((node, share.root), 0.0))
        return boot_clock_s() > vouched_s + dead_after_s(limit_s, job.spec.stop.grace_s)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._keeping] if self._keeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, node: str) -> None:
        task = asyncio.create_task(self._renew(node), name=f"renew the lease on {node}")
        self._tasks[node] = task
        task.add_done_callback(lambda _: self._tasks.pop(node, None))

    async def _renew(self, node: str) -> None:
        known = self._watch.moment(node)
        if known is None:
            return
        as_of, heard_s = known
        # Noted before it is sent: whether it arrives is not for us to know.
        self._vouch(node, heard_s)
        try:
            self._watch.note_moment(node, await self._watch.runs(node).renew(as_of))
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.debug("no lease renewed: %s", error, extra={"node": node})

    def _vouch(self, node: str, heard_s: float) -> None:
        machine = self._watch.machine(node)
        place = (node, machine.root if machine else None)
        with self._vouching:  # what the other thread vouched for must not be forgotten
            self._vouched[place] = max(heard_s, self._vouched.get(place, 0.0))
