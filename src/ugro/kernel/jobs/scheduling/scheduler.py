"""Which waiting jobs start now, where, and what the others wait for: one pass over the queue, without side effects.

A job on several nodes starts on all of them or not at all. Jobs are considered in the queue's order; small ones fill
gaps, but never use devices reserved for a job before them. A pass only assigns devices and never frees any: where a job
could not start, no later one of its kind can, so most of a long queue need not be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ugro.features.quotas.rules import Over
from ugro.features.quotas.rules_room import QuotaRoom
from ugro.kernel.jobs.model import FINAL_STATES, JobState
from ugro.kernel.jobs.scheduling import reasons
from ugro.kernel.jobs.scheduling.demand import Demand, Need
from ugro.kernel.jobs.scheduling.fit import Demands
from ugro.kernel.jobs.scheduling.model import (
    ClusterView,
    Decision,
    Fail,
    Holding,
    NodeView,
    Preempt,
    Start,
    Wait,
    Waiting,
    devices_of,
    with_named,
)
from ugro.kernel.jobs.scheduling.placement import Candidates, Ledger, join, shared
from ugro.kernel.jobs.scheduling.queue import Kind, Queue, WaitingJobs
from ugro.kernel.jobs.scheduling.reasons import Blocked
from ugro.kernel.jobs.scheduling.reservation import reservation_for, victims_for
from ugro.kernel.support.quantities import format_duration, jobs

# --- nodes that sleep -------------------------------------------------------------------------------------------------
# A job is placed on nodes that are awake first; where that fails, also on those that can be woken. A job that was given
# a node that sleeps keeps all its devices in this pass, and starts when the node is awake.


class Sleepers:
    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = {node.name: node for node in nodes if node.asleep is not None and node.unusable is None}
        self._awake: dict[Demand, Demand] = {}
        self._needs: dict[int, Need] = {}

    def awake(self, demand: Demand) -> Demand:
        """The same of nodes that are awake; the same object if all are."""
        if not self._nodes:
            return demand
        found = self._awake.get(demand)
        if found is None:
            needs = tuple(replace(need, wants_awake=True, _fitting={}) for need in demand.needs)
            found = self._awake[demand] = Demand(needs)
        return found

    def soonest(self, now: float) -> float:
        """When the first of them could be awake."""
        return min(node.asleep.ready(now) for node in self._nodes.values() if node.asleep is not None)

    def note(self, job: int, need: Need) -> None:
        """By which alternative it was placed."""
        if self._nodes:
            self._needs[job] = need

    def waited_for(self, start: Start, now: float) -> Wait | None:
        """None if all its nodes are awake."""
        found = [self._nodes[name] for name in start.placement.nodes if name in self._nodes]
        if not found:
            return None
        blocked = reasons.waits_for_sleepers(self._needs[start.job], found, now)
        return Wait(start.job, blocked.reason, (), blocked.until, tuple(node.name for node in found))


# --- a pass over the queue --------------------------------------------------------------------------------------------


# Devices are reserved for this many waiting jobs, the first in the queue that cannot start. One would prevent
# starvation; a few more also protect jobs that wait for different nodes.
MOST_RESERVATIONS = 4


def schedule(view: ClusterView) -> list[Decision]:
    """The decisions in the queue's order: one for each waiting job, and one for each job to be stopped for another."""
    return _Pass(view, None).decisions()


def actions(view: ClusterView, waiting: WaitingJobs | None = None) -> list[Decision]:
    """The decisions to act on, without those to wait. ``waiting`` replaces the waiting jobs in ``view``."""
    return [one for one in _Pass(view, waiting).short() if not isinstance(one, _Behind | Wait)]


class Explanation:
    """The decisions of one pass about single jobs. Reasons are worded only for the jobs that are asked for."""

    def __init__(self, view: ClusterView, waiting: WaitingJobs | None = None) -> None:
        self._pass = _Pass(view, waiting)
        self._known = {one.job: one for one in self._pass.short() if not isinstance(one, Preempt)}

    def of(self, job_id: int) -> Start | Fail | Wait | None:
        """None: it does not wait."""
        one = self._known.get(job_id) or self._pass.without_its_turn(job_id)
        return self._pass.worded(one) if isinstance(one, _Behind) else one


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting job's decision, and the jobs before it in the queue."""

    decision: Start | Fail | Wait
    starting_before: tuple[Start, ...]
    waiting_before: tuple[int, ...]


def turn_of(view: ClusterView, job_id: int, waiting: WaitingJobs | None = None) -> Turn:
    """Looks at every job up to this one, and at the others only as far as they matter. The job must be waiting."""
    return _Pass(view, waiting).turn_of(job_id)


@dataclass(frozen=True, slots=True)
class NodeWishes:
    """What the waiting jobs want of nodes that may sleep."""

    wakes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by node, the jobs that would start there
    needed: frozenset[str] = frozenset()  # nodes on which a job is to start, or has something reserved


def node_wishes(view: ClusterView, waiting: WaitingJobs) -> NodeWishes:
    made = _Pass(view, waiting)
    wakes: dict[str, tuple[int, ...]] = {}
    needed: set[str] = set()
    for one in made.short():
        if isinstance(one, Start):
            needed.update(one.placement.nodes)
        elif isinstance(one, Wait):
            for name in one.wakes:
                wakes[name] = (*wakes.get(name, ()), one.job)
    return NodeWishes(wakes, frozenset(needed | made.reserved()))


class _Pass:
    def __init__(self, view: ClusterView, waiting: WaitingJobs | None) -> None:
        self._waiting = WaitingJobs.of(view.waiting, view.ended) if waiting is None else waiting
        self._waiting.end_pauses(view.now)
        self._waiting.tell_users_apart(any(node.is_personal for node in view.nodes))
        if named := self._waiting.named_nodes():
            view = replace(view, nodes=with_named(view.nodes, named))
        self._view = view
        self._ledger = Ledger(view)
        self._queue = Queue(view, self._waiting)
        self._demands = Demands(view.nodes)
        self._candidates: dict[tuple[Need, int], Candidates] = {}
        self._failed: dict[Demand, set[int]] = {}  # with which reservations allowed
        self._cannot_be_kept: set[Demand] = set()
        self._blocked: dict[Demand, Blocked] = {}
        self._sleepers = Sleepers(view.nodes)
        self._quotas = QuotaRoom(view) if view.accounts.quotas else None

    def decisions(self) -> list[Decision]:
        self._queue.skips_closed = False
        # What is free and what is reserved is only known at the end of the pass.
        return [self.worded(one) if isinstance(one, _Behind) else one for one in list(self.short())]

    def short(self) -> Iterator[Decision | _Behind]:
        """Reads each line only as far as there can be something to do."""
        for job, kind in self._queue:
            yield from self._before_its_turn(job) or self._decide(job, kind)

    def turn_of(self, job_id: int) -> Turn:
        self._queue.skips_closed = False
        before: list[int] = []
        starts: list[Start] = []
        own: Decision | _Behind | None = None
        for one in self.short():
            if own is not None:
                continue
            if one.job == job_id and not isinstance(one, Preempt):
                own = one
                self._queue.skips_closed = True
            elif isinstance(one, Start):
                starts.append(one)
            elif isinstance(one, Wait | _Behind):
                before.append(one.job)
        decision = self.worded(own) if isinstance(own, _Behind) else own
        assert isinstance(decision, Start | Fail | Wait), f"job {job_id} does not wait"
        return Turn(decision, tuple(starts), tuple(before))

    def without_its_turn(self, job_id: int) -> Wait | _Behind | None:
        """The decision about a job that a short pass did not look at."""
        job = self._waiting.get(job_id)
        if job is None:
            return None
        for one in self._before_its_turn(job):
            return one if isinstance(one, Wait) else None
        kind = self._waiting.kind_of(job_id)
        found = self._within_quota(job, kind)
        return self._over_quota(job, found) if isinstance(found, Over) else _Behind(job_id, found)

    def worded(self, one: _Behind) -> Wait:
        blocked = self._blocked.get(one.demand)
        if blocked is None:
            blocked = self._blocked[one.demand] = reasons.waits_for_others(one.demand, self._ledger)
        return _wait(one.job, blocked)

    def _before_its_turn(self, job: Waiting) -> list[Decision | _Behind]:
        now = self._view.now
        if job.not_before is not None and job.not_before > now:
            pause = format_duration(job.not_before - now)
            return [Wait(job.id, f"waits {pause} before attempt {job.attempt + 1}", (), job.not_before)]
        # Between attempts: the jobs it runs after ended before its first attempt.
        if job.state is not JobState.QUEUED or not (job.spec.after.ok or job.spec.after.any):
            return []
        return _after(job, self._waiting)

    def _decide(self, job: Waiting, kind: Kind) -> list[Decision | _Behind]:
        demand = self._within_quota(job, kind)
        if isinstance(demand, Over):
            self._hold_back(job, kind, demand)
            return [self._over_quota(job, demand)]  # it neither reserves anything nor stops others
        if self._queue.is_closed(kind):
            return [_Behind(job.id, demand)]
        return self._place_or_keep(job, kind, demand)

    def _place_or_keep(self, job: Waiting, kind: Kind, demand: Demand) -> list[Decision | _Behind]:
        awake = self._sleepers.awake(demand)
        start = self._start(job, kind, awake)
        if start is None and awake is not demand:
            if self._starts_soon(job, awake):
                demand = awake
            else:
                start = self._start(job, kind, demand)
        if start is not None:
            self._given(job, kind, start)
            return [self._sleepers.waited_for(start, self._view.now) or start]
        kept = self._keep(job, demand)
        if not kept:
            self._close(kind)
            return [_Behind(job.id, demand)]
        if self._quotas is not None:
            self._quotas.reserved(job, kind, demand, self._ledger.reservations[-1].start)
        return kept

    def _given(self, job: Waiting, kind: Kind, start: Start) -> None:
        self._queue.given(job, devices_of(start.placement))
        if self._quotas is not None:
            self._quotas.started(job, kind, start)

    def _within_quota(self, job: Waiting, kind: Kind) -> Demand | Over:
        """Its demand, with no more than its user may have; or the quota that it waits for."""
        demand = self._demands.of(kind)
        return demand if self._quotas is None else self._quotas.limited(job.user, kind, demand)

    def _over_quota(self, job: Waiting, over: Over) -> Wait:
        assert self._quotas is not None
        return self._quotas.wait(job.id, over)

    def _hold_back(self, job: Waiting, kind: Kind, over: Over) -> None:
        """Once for each user and kind: a pass that looks at every job decides as one that does not."""
        if self._quotas is None or self._queue.is_closed(kind) or self._queue.is_held_back(job.user, kind):
            return
        self._queue.hold_back(job.user, kind)
        demand = self._demands.of(kind)
        if any(self._ledger.count_capable(need) >= need.min_nodes for need in demand.needs):
            self._quotas.held_back(job, kind, demand, over)

    def _starts_soon(self, job: Waiting, awake: Demand) -> bool:
        """Whether nodes that are awake are free before one that sleeps could be woken."""
        if len(self._ledger.reservations) >= MOST_RESERVATIONS:
            return False
        found = reservation_for(job.id, awake, self._ledger)
        soonest = self._sleepers.soonest(self._view.now)
        return found is not None and found.start is not None and found.start <= soonest

    def reserved(self) -> set[str]:
        """The nodes on which something is reserved."""
        return {claim.room.node.name for one in self._ledger.reservations for claim in one.claims}

    def _close(self, kind: Kind) -> None:
        self._queue.close(kind)
        if not self._ledger.open_rooms and len(self._ledger.reservations) >= MOST_RESERVATIONS:
            self._queue.close_all()  # no job can start any more, and no more is reserved

    def _start(self, job: Waiting, kind: Kind, demand: Demand) -> Start | None:
        if kind.resources.sharing is not None and (joined := join(demand.needs[0], self._ledger, job.avoid)):
            self._sleepers.note(job.id, demand.needs[0])
            return Start(job.id, *joined)
        end = kind.end(self._view.now)
        allowed = self._ledger.allowed(end)
        failed = self._failed.get(demand)
        if failed is not None and (allowed in failed or any(allowed & ~tried == 0 for tried in failed)):
            return None
        for need in demand.needs:
            placed = self._candidates_for(need, allowed, job.why_avoided).place()
            if placed is not None:
                self._sleepers.note(job.id, need)
                reason = reasons.start_reason(need, placed, self._ledger, allowed, end)
                sharing, placement = need.resources.sharing, placed.placement
                return Start(job.id, shared(placement, self._ledger, sharing) if sharing else placement, reason)
        self._failed.setdefault(demand, set()).add(allowed)
        return None

    def _candidates_for(self, need: Need, allowed: int, avoid: Mapping[str, str] | None = None) -> Candidates:
        if avoid:
            return Candidates(self._ledger, need, allowed, avoid)
        found = self._candidates.get((need, allowed))
        if found is None:
            found = self._candidates[need, allowed] = Candidates(self._ledger, need, allowed)
        return found

    def _keep(self, job: Waiting, demand: Demand) -> list[Decision | _Behind]:
        """Reserves devices for one of the first jobs that cannot start, and stops others if it is urgent.

        Returns nothing if nothing is reserved for it.
        """
        ledger = self._ledger
        if len(ledger.reservations) >= MOST_RESERVATIONS or demand in self._cannot_be_kept:
            return []
        reservation = reservation_for(job.id, demand, ledger)
        if reservation is None:
            self._cannot_be_kept.add(demand)
            return []
        victims = victims_for(demand, job.spec.priority, ledger)
        for victim in victims:
            ledger.stop(victim.id)
        if victims:
            reservation = reservation_for(job.id, demand, ledger) or reservation
        blocked = reasons.waits_for_holders(reservation, victims, ledger)
        ledger.reserve(reservation)
        return [*(_preempt(victim, job) for victim in victims), _wait(job.id, blocked)]


class _Behind(NamedTuple):
    """A job that waits with nothing reserved for it."""

    job: int
    demand: Demand


def _wait(job: int, blocked: Blocked) -> Wait:
    return Wait(job, blocked.reason, blocked.by, blocked.until)


def _preempt(victim: Holding, job: Waiting) -> Preempt:
    urgent, own = job.spec.priority, victim.priority
    reason = f"stopped for job {job.id} of priority {urgent}; it is preemptible and has priority {own}"
    return Preempt(victim.id, job.id, reason)


def _after(job: Waiting, waiting: WaitingJobs) -> list[Decision | _Behind]:
    ended, after = waiting.outcomes, job.spec.after
    for other in after.ok:
        if ended.get(other) in FINAL_STATES - {JobState.SUCCEEDED}:
            return [Fail(job.id, f"it requires that job {other} succeeds, and job {other} ended as {ended[other]}")]
    missing = [other for other in (*after.ok, *after.any) if ended.get(other) not in FINAL_STATES]
    if not missing:
        return []
    return [Wait(job.id, f"runs after {jobs(missing)}", tuple(missing))]
