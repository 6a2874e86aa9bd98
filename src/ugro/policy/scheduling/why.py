"""What a job waits for, who holds it and when it may start, in words: the answer of ``ugro why``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ugro.core.errors import NotFound
from ugro.core.job import ANY_GPUS, JobState, Placement
from ugro.core.support.quantity import format_duration
from ugro.policy.scheduling.decision import Decision, Fail, Start, Wait
from ugro.policy.scheduling.reasons import given, what_is_left_out
from ugro.policy.scheduling.scheduler import schedule
from ugro.policy.scheduling.snapshot import Holding, Snapshot, Waiting
from ugro.policy.wording import count_of, names

# How much looking ahead may cost: so many jobs are considered again, over all the ends that are played through.
_FORECAST_JOBS = 5_000
_MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Why:
    job: int
    text: str
    details: tuple[str, ...] = ()
    blocked_by: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()  # where those are
    may_start_at: float | None = None  # None: nobody knows


def why(snapshot: Snapshot, job_id: int) -> Why:
    if (already := _not_waiting(snapshot, job_id)) is not None:
        return already
    decisions = schedule(snapshot)
    decision = next(one for one in decisions if one.job == job_id and isinstance(one, Start | Fail | Wait))
    if isinstance(decision, Start):
        text, nodes = f"it starts now: {decision.reason}", decision.placement.nodes
        return Why(job_id, text, nodes=nodes, may_start_at=snapshot.now)
    if isinstance(decision, Fail):
        return Why(job_id, f"it will not start: {decision.reason}")
    assert isinstance(decision, Wait)
    start = decision.may_start_at
    if start is None:
        start = _forecast(snapshot, decisions, job_id)
    details = (*_details(snapshot, decisions, decision), *_other_ways(snapshot, job_id), _when(start, snapshot.now))
    return Why(job_id, decision.reason, details, decision.blocked_by, _nodes_of(decision, snapshot), start)


def _other_ways(snapshot: Snapshot, job_id: int) -> Iterator[str]:
    """A job that left GPUs open may wait for some although nodes without any are free."""
    job = next(job for job in snapshot.waiting if job.id == job_id)
    if job.spec.resources.gpus_per_node != ANY_GPUS:
        return
    on_cores = replace(job, spec=replace(job.spec, resources=replace(job.spec.resources, gpus_per_node=0)))
    others = (other for other in snapshot.waiting if other.id != job_id)
    decisions = schedule(replace(snapshot, waiting=(*others, on_cores)))
    if any(isinstance(one, Start) and one.job == job_id for one in decisions):
        yield "without GPUs it could start now: --gpus-per-node 0"


def _not_waiting(snapshot: Snapshot, job_id: int) -> Why | None:
    if any(job.id == job_id for job in snapshot.waiting):
        return None
    for holder in snapshot.holding:
        if holder.id == job_id:
            return Why(job_id, f"it holds {_held(holder.placement)}", nodes=holder.placement.nodes)
    if job_id in snapshot.ended:
        return Why(job_id, f"it has ended: {snapshot.ended[job_id]}")
    raise NotFound(f"there is no job {job_id}", hint="see all: ugro status")


def _details(snapshot: Snapshot, decisions: list[Decision], wait: Wait) -> Iterator[str]:
    blockers = {holder.id: holder for holder in snapshot.holding if holder.id in wait.blocked_by}
    for job in wait.blocked_by:
        if job in blockers:
            yield _holder(blockers[job], snapshot.now)
    waiting = {job.id: job for job in snapshot.waiting}
    for job in wait.blocked_by:
        if job in waiting:
            yield f"job {job} of {waiting[job].user} waits too, with priority {waiting[job].spec.priority}"
    before = [one for one in decisions[: decisions.index(wait)] if isinstance(one, Wait)]
    if before:
        yield f"{count_of(len(before), 'waiting job')} before it in the queue"
    yield from what_is_left_out(sorted(snapshot.nodes, key=lambda node: node.name))


def _holder(holder: Holding, now: float) -> str:
    end = holder.end(now)
    if holder.is_stopping:
        until = "is being stopped"
    else:
        until = "has no time limit" if end is None else f"ends within {format_duration(end - now)}"
    return f"job {holder.id} of {holder.user} holds {_held(holder.placement)} and {until}"


def _held(placement: Placement) -> str:
    return names([given(share) for share in placement.shares])


def _nodes_of(wait: Wait, snapshot: Snapshot) -> tuple[str, ...]:
    blockers = [holder for holder in snapshot.holding if holder.id in wait.blocked_by]
    return tuple(dict.fromkeys(node for holder in blockers for node in holder.placement.nodes))


def _when(start: float | None, now: float) -> str:
    if start is None:
        return "nobody knows when it may start"
    return f"it may start within {format_duration(start - now)}, if nothing more urgent comes"


def _forecast(snapshot: Snapshot, decisions: list[Decision], job_id: int) -> float | None:
    """When it starts if everything takes as long as its limit; None if that is not known, or too far away to tell."""
    order = [one.job for one in decisions if not isinstance(one, Fail)]
    # What comes later in the queue may fill gaps, but does not hold it up.
    kept = set(order[: order.index(job_id) + 1])
    snapshot = replace(snapshot, waiting=tuple(job for job in snapshot.waiting if job.id in kept))
    for _ in range(min(_MOST_ROUNDS, _FORECAST_JOBS // max(1, len(snapshot.waiting)))):
        starts = {one.job: one.placement for one in decisions if isinstance(one, Start)}
        if job_id in starts:
            return snapshot.now
        later = _after_the_next_end(_started(snapshot, starts))
        if later is None:
            return None
        snapshot = later
        decisions = schedule(snapshot)
    return None


def _started(snapshot: Snapshot, starts: dict[int, Placement]) -> Snapshot:
    started = tuple(_holding(job, starts[job.id], snapshot.now) for job in snapshot.waiting if job.id in starts)
    waiting = tuple(job for job in snapshot.waiting if job.id not in starts)
    return replace(snapshot, waiting=waiting, holding=(*snapshot.holding, *started))


def _holding(job: Waiting, placement: Placement, now: float) -> Holding:
    return Holding(
        job.id, job.user, job.spec.priority, placement, job.submitted_at, started_at=now,
        time_limit_s=job.spec.time_limit_s, is_preemptible=job.spec.is_preemptible,
    )  # fmt: skip


def _after_the_next_end(snapshot: Snapshot) -> Snapshot | None:
    ends = {holder.id: end for holder in snapshot.holding if (end := holder.end(snapshot.now)) is not None}
    pauses = [job.not_before for job in snapshot.waiting if job.not_before and job.not_before > snapshot.now]
    if not ends and not pauses:
        return None
    now = min([*ends.values(), *pauses])
    gone = {job for job, end in ends.items() if end <= now}
    return replace(
        snapshot,
        now=now,
        holding=tuple(holder for holder in snapshot.holding if holder.id not in gone),
        ended={**snapshot.ended, **dict.fromkeys(gone, JobState.SUCCEEDED)},
    )
