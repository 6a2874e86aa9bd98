"""Which waiting jobs start now, where, and what the others wait for: one pass over a snapshot, without side effects.

Gangs start whole or not at all. Jobs are taken in the queue's order; small ones fill gaps, but nothing that is kept
for a job before them. A pass gives devices away and never takes any back, so a demand that failed once in it need
not be tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ugro.core.job import FINAL_STATES, JobState
from ugro.core.support.quantity import format_duration
from ugro.policy.scheduling import reasons
from ugro.policy.scheduling.decision import Decision, Fail, Preempt, Start, Wait
from ugro.policy.scheduling.demand import Demand, Demands, Need
from ugro.policy.scheduling.ledger import Ledger
from ugro.policy.scheduling.placement import Candidates
from ugro.policy.scheduling.preemption import victims_for
from ugro.policy.scheduling.queue import Queue
from ugro.policy.scheduling.reasons import Blocked
from ugro.policy.scheduling.reservation import reservation_for
from ugro.policy.scheduling.snapshot import Holding, Snapshot, Waiting, devices_of
from ugro.policy.wording import jobs

# Devices are kept for this many waiting jobs, the first in the queue that cannot start. One would do against
# starvation; a few more also protect jobs that wait for quite different nodes.
MOST_RESERVATIONS = 4


def schedule(snapshot: Snapshot) -> list[Decision]:
    """The decisions in the queue's order: one for each waiting job, and one for each job that is to make way."""
    return _Pass(snapshot).decisions()


def actions(snapshot: Snapshot) -> list[Decision]:
    """Only what is to be done: why the others wait takes longer to say than to know."""
    return [one for one in _Pass(snapshot).until_all_is_given() if not isinstance(one, _Behind | Wait)]


class _Pass:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._ledger = Ledger(snapshot)
        self._queue = Queue(snapshot)
        self._demands = Demands(snapshot.nodes)
        self._candidates: dict[tuple[Need, int], Candidates] = {}
        self._failed: dict[Demand, set[int]] = {}  # with which reservations allowed
        self._cannot_be_kept: set[Demand] = set()
        self._blocked: dict[Demand, Blocked] = {}

    def decisions(self) -> list[Decision]:
        # What is free and what is kept is only known once everybody had a turn.
        return [self._behind(one) if isinstance(one, _Behind) else one for one in list(self._made())]

    def until_all_is_given(self) -> Iterator[Decision | _Behind]:
        """As far into the queue as there can be something to do: most of a long one need not be looked at."""
        for one in self._made():
            yield one
            if isinstance(one, _Behind) and self._is_all_given():
                return

    def _made(self) -> Iterator[Decision | _Behind]:
        for job in self._queue:
            yield from self._before_its_turn(job) or self._decide(job)

    def _is_all_given(self) -> bool:
        """Nobody can start any more, nothing more is kept for anybody, and nobody depends on how another ended."""
        is_full = not self._ledger.open_rooms and len(self._ledger.reservations) >= MOST_RESERVATIONS
        return is_full and not self._snapshot.ended

    def _before_its_turn(self, job: Waiting) -> list[Decision | _Behind]:
        now = self._snapshot.now
        if job.not_before is not None and job.not_before > now:
            pause = format_duration(job.not_before - now)
            return [Wait(job.id, f"pauses for {pause} before attempt {job.attempt + 1}", (), job.not_before)]
        # Between attempts it has started before: what it came after is long over.
        if job.state is not JobState.QUEUED or not (job.spec.after.ok or job.spec.after.any):
            return []
        return _after(job, self._snapshot)

    def _decide(self, job: Waiting) -> list[Decision | _Behind]:
        demand = self._demands.of(job.spec)
        start = self._start(job, demand)
        if start is not None:
            self._queue.given(job, devices_of(start.placement))
            return [start]
        return self._keep(job, demand)

    def _start(self, job: Waiting, demand: Demand) -> Start | None:
        end = _end(job, self._snapshot.now)
        allowed = self._ledger.allowed(end)
        failed = self._failed.get(demand)
        if failed is not None and (allowed in failed or any(allowed & ~tried == 0 for tried in failed)):
            return None
        for need in demand.needs:
            placed = self._candidates_for(need, allowed, job.avoid).place()
            if placed is not None:
                return Start(job.id, placed.placement, reasons.start_reason(need, placed, self._ledger, allowed, end))
        self._failed.setdefault(demand, set()).add(allowed)
        return None

    def _candidates_for(self, need: Need, allowed: int, avoid: tuple[str, ...] = ()) -> Candidates:
        if avoid:
            return Candidates(self._ledger, need, allowed, avoid)
        found = self._candidates.get((need, allowed))
        if found is None:
            found = self._candidates[need, allowed] = Candidates(self._ledger, need, allowed)
        return found

    def _keep(self, job: Waiting, demand: Demand) -> list[Decision | _Behind]:
        """Keep devices for a job that cannot start, if it is among the first of those; end others if it is urgent."""
        ledger = self._ledger
        if len(ledger.reservations) >= MOST_RESERVATIONS or demand in self._cannot_be_kept:
            return [_Behind(job.id, demand)]
        reservation = reservation_for(job.id, demand, ledger)
        if reservation is None:
            self._cannot_be_kept.add(demand)
            return [_Behind(job.id, demand)]
        victims = victims_for(demand, job.spec.priority, ledger)
        for victim in victims:
            ledger.stop(victim.id)
        if victims:
            reservation = reservation_for(job.id, demand, ledger) or reservation
        blocked = reasons.waits_for_holders(reservation, victims, ledger)
        ledger.reserve(reservation)
        return [*(_preempt(victim, job) for victim in victims), _wait(job.id, blocked)]

    def _behind(self, one: _Behind) -> Wait:
        blocked = self._blocked.get(one.demand)
        if blocked is None:
            blocked = self._blocked[one.demand] = reasons.waits_for_others(one.demand, self._ledger)
        return _wait(one.job, blocked)


class _Behind(NamedTuple):
    """A job that waits with nothing kept for it."""

    job: int
    demand: Demand


def _wait(job: int, blocked: Blocked) -> Wait:
    return Wait(job, blocked.reason, blocked.by, blocked.until)


def _end(job: Waiting, now: float) -> float | None:
    """When a job that starts now is gone at the latest."""
    limit = job.spec.time_limit_s
    return None if limit is None else now + limit + job.spec.stop.grace_s


def _preempt(victim: Holding, job: Waiting) -> Preempt:
    reason = f"makes way for job {job.id} of priority {job.spec.priority}; it is preemptible and has {victim.priority}"
    return Preempt(victim.id, job.id, reason)


def _after(job: Waiting, snapshot: Snapshot) -> list[Decision | _Behind]:
    ended, after = snapshot.ended, job.spec.after
    for other in after.ok:
        if ended.get(other) in FINAL_STATES - {JobState.SUCCEEDED}:
            return [Fail(job.id, f"it was to run once job {other} had succeeded, and that ended as {ended[other]}")]
    missing = [other for other in (*after.ok, *after.any) if ended.get(other) not in FINAL_STATES]
    if not missing:
        return []
    return [Wait(job.id, f"runs after {jobs(missing)}", tuple(missing))]
