"""What a job waits for, which jobs hold it and when it can start, in words: the answer of ``ugro why``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ugro.kernel.jobs.model import ANY_GPUS, JobState, Placement
from ugro.kernel.jobs.records import Held, Why, gpu_part
from ugro.kernel.jobs.scheduling.model import ClusterView, Fail, Holding, Start, Wait, Waiting
from ugro.kernel.jobs.scheduling.queue import WaitingJobs
from ugro.kernel.jobs.scheduling.reasons import given, what_is_left_out
from ugro.kernel.jobs.scheduling.scheduler import Turn, actions, turn_of
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.quantities import PRIVATE_JOB, count_of, format_duration, names, without_numbers

# The most that a forecast may cost: jobs considered, summed over all simulated passes.
_FORECAST_JOBS = 5_000
_MOST_ROUNDS = 200


def why(
    view: ClusterView,
    job_id: int,
    waiting: WaitingJobs | None = None,
    is_hidden: Callable[[int], bool] = lambda number: False,
) -> Why:
    """``waiting`` replaces the waiting jobs in ``view``, if they are kept from pass to pass.

    ``is_hidden``: whether who asks must not know of a job.
    """
    found = _why(view, job_id, waiting, is_hidden)
    blocked_by = tuple(number for number in found.blocked_by if not is_hidden(number))
    return replace(found, text=without_numbers(found.text, is_hidden), blocked_by=blocked_by)


def _why(view: ClusterView, job_id: int, waiting: WaitingJobs | None, is_hidden: Callable[[int], bool]) -> Why:
    if waiting is None:
        waiting = WaitingJobs.of(view.waiting, view.ended)
    job = waiting.get(job_id)
    if job is None:
        return _not_waiting(view, job_id)
    turn = turn_of(view, job_id, waiting)
    decision = turn.decision
    if isinstance(decision, Start):
        text, nodes = f"it starts now: {decision.reason}", decision.placement.nodes
        return Why(job_id, text, nodes=nodes, may_start_at=view.now)
    if isinstance(decision, Fail):
        return Why(job_id, f"it will not start: {decision.reason}")
    if decision.quota is not None:
        return _over_quota(view, decision, _details(view, turn, waiting, is_hidden))
    start = decision.may_start_at
    if start is None:
        start = _forecast(_up_to(job, turn, view, waiting), turn, job_id)
    details = (*_details(view, turn, waiting, is_hidden), *_other_ways(view, job, waiting), _when(start, view.now))
    return Why(job_id, decision.reason, details, decision.blocked_by, _nodes_of(decision, view), start)


def _over_quota(view: ClusterView, wait: Wait, details: Iterator[str]) -> Why:
    until = wait.quota_until
    when = "unknown when the quota has room" if until is None else "then it starts as soon as devices are free"
    nodes = _nodes_of(wait, view)
    return Why(wait.job, wait.reason, (*details, when), wait.blocked_by, nodes, quota=wait.quota, quota_until=until)


def _other_ways(view: ClusterView, job: Waiting, waiting: WaitingJobs) -> Iterator[str]:
    """A job that left GPUs open may wait for some although nodes without GPUs are free."""
    if job.spec.resources.gpus_per_node != ANY_GPUS:
        return
    on_cores = replace(job, spec=replace(job.spec, resources=replace(job.spec.resources, gpus_per_node=0)))
    others = (other for other in waiting if other.id != job.id)
    decisions = actions(replace(view, waiting=(*others, on_cores), ended=waiting.outcomes))
    if any(isinstance(one, Start) and one.job == job.id for one in decisions):
        yield "without GPUs it could start now: --gpus-per-node 0"


def _not_waiting(view: ClusterView, job_id: int) -> Why:
    for holder in view.holding:
        if holder.id == job_id:
            return Why(job_id, f"it holds {_held(holder.placement)}", nodes=holder.placement.nodes)
    if job_id in view.ended:
        return Why(job_id, f"it has ended: {view.ended[job_id]}")
    raise NotFound(f"there is no job {job_id}", hint="see all: ugro status")


def _details(
    view: ClusterView, turn: Turn, waiting: WaitingJobs, is_hidden: Callable[[int], bool]
) -> Iterator[str]:
    assert isinstance(turn.decision, Wait)
    blocked_by = turn.decision.blocked_by
    blockers = {holder.id: holder for holder in view.holding if holder.id in blocked_by}
    for number in blocked_by:
        if number in blockers:
            yield _holder(blockers[number], view.now, is_hidden=is_hidden(number))
    for number in blocked_by:
        if (job := waiting.get(number)) is not None:
            which = PRIVATE_JOB if is_hidden(number) else f"job {number} of {job.user}"
            yield f"{which} waits too, with priority {job.spec.priority}"
    if turn.waiting_before:
        yield f"{count_of(len(turn.waiting_before), 'waiting job')} before it in the queue"
    own = waiting.get(turn.decision.job)
    imports, user = (own.spec.node_imports.names, own.user) if own is not None else ((), "")
    yield from what_is_left_out(sorted(view.nodes, key=lambda node: node.name), imports, user)


def _holder(holder: Holding, now: float, *, is_hidden: bool) -> str:
    end = holder.end(now)
    if holder.is_stopping:
        until = "is being stopped"
    else:
        until = "has no time limit" if end is None else f"ends within {format_duration(end - now)}"
    which = PRIVATE_JOB if is_hidden else f"job {holder.id} of {holder.user}"
    return f"{which} holds {_held(holder.placement)} and {until}"


def _held(placement: Placement) -> str:
    return names([given(share) for share in placement.shares])


def _nodes_of(wait: Wait, view: ClusterView) -> tuple[str, ...]:
    blockers = [holder for holder in view.holding if holder.id in wait.blocked_by]
    return tuple(dict.fromkeys(node for holder in blockers for node in holder.placement.nodes))


def _when(start: float | None, now: float) -> str:
    if start is None:
        return "unknown when it can start"
    return f"it can start within {format_duration(start - now)}, unless a more urgent job is submitted"


def _up_to(job: Waiting, turn: Turn, view: ClusterView, waiting: WaitingJobs) -> ClusterView:
    """Without the jobs behind it in the queue: they may fill gaps, but do not delay it."""
    before = [waiting.get(number) for number in (*(start.job for start in turn.starting_before), *turn.waiting_before)]
    return replace(view, waiting=(*(one for one in before if one is not None), job), ended=waiting.outcomes)


def _forecast(view: ClusterView, turn: Turn, job_id: int) -> float | None:
    """When it starts if every job runs up to its time limit; None if that is unknown or too far ahead."""
    starts = turn.starting_before
    for _ in range(min(_MOST_ROUNDS, _FORECAST_JOBS // len(view.waiting))):
        placements = {start.job: start.placement for start in starts}
        if job_id in placements:
            return view.now
        later = _after_the_next_end(_started(view, placements))
        if later is None:
            return None
        view = later
        starts = tuple(one for one in actions(view) if isinstance(one, Start))
    return None


def _started(view: ClusterView, starts: dict[int, Placement]) -> ClusterView:
    started = tuple(_holding(job, starts[job.id], view.now) for job in view.waiting if job.id in starts)
    waiting = tuple(job for job in view.waiting if job.id not in starts)
    return replace(view, waiting=waiting, holding=(*view.holding, *started))


def _holding(job: Waiting, placement: Placement, now: float) -> Holding:
    return Holding(
        job.id, job.user, job.spec.priority, placement, job.submitted_at, started_at=now,
        time_limit_s=job.spec.time_limit_s, is_preemptible=job.spec.is_preemptible,
        gpu_part=gpu_part(job.spec.resources),
    )  # fmt: skip


def _after_the_next_end(view: ClusterView) -> ClusterView | None:
    ends = {holder.id: end for holder in view.holding if (end := holder.end(view.now)) is not None}
    pauses = [job.not_before for job in view.waiting if job.not_before and job.not_before > view.now]
    if not ends and not pauses:
        return None
    now = min([*ends.values(), *pauses])
    gone = {job for job, end in ends.items() if end <= now}
    accounts = view.accounts
    for holder in view.holding:
        if holder.id in gone and holder.started_at is not None:
            gpus = Held.of(holder.placement, holder.gpu_part).gpus
            accounts = accounts.with_use(holder.user, now, gpus * (now - holder.started_at))
    return replace(
        view,
        now=now,
        accounts=accounts,
        holding=tuple(holder for holder in view.holding if holder.id not in gone),
        ended={**view.ended, **dict.fromkeys(gone, JobState.SUCCEEDED)},
    )
