"""How an attempt went, from what its nodes recorded: the facts that ``policy.postmortem`` judges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ugro.core.failure import Cause, Failure, RankExit
from ugro.core.job import Ending, Job
from ugro.core.login import node_of
from ugro.nodes.runs import RunStatus
from ugro.policy.lifecycle.postmortem import Lost, RankEnd, classify, disk_hint

_STOPPED_FOR = {
    Ending.TIME_LIMIT: Cause.TIME_LIMIT,
    Ending.PREEMPTED: Cause.PREEMPTED,
    Ending.OWNER: Cause.PREEMPTED,
}
_LOST = frozenset({"lost", "lease-expired", "interrupted"})


def failure_of(job: Job, statuses: Sequence[tuple[str, RunStatus | None]], offset_s: Callable[[str], float]) -> Failure:
    """``statuses``: each node and its exit status; None for one whose part is over without any."""
    return replace(_judged(job, statuses, offset_s), exits=exits_of(status for _, status in statuses))


def exits_of(statuses: Iterable[RunStatus | None]) -> tuple[RankExit, ...]:
    records = [rank for status in statuses if status is not None for rank in status.ranks]
    return tuple(RankExit(one.rank, one.code, one.signal) for one in sorted(records, key=lambda one: one.rank))


def _judged(job: Job, statuses: Iterable[tuple[str, RunStatus | None]], offset_s: Callable[[str], float]) -> Failure:
    ends: list[RankEnd] = []
    lost: list[Lost] = []
    for node, status in statuses:
        if status is None:
            lost.append(Lost(node, Cause.NODE_LOST))
        elif status.outcome == "start-failed":
            return _not_started(node, status)
        elif status.outcome in _LOST:
            lost.append(Lost(node, _cause_of_loss(status), status.may_have_left))
        elif status.outcome != "never-started":
            ends += _rank_ends(node, status, offset_s(node))
    stopped_for = _STOPPED_FOR.get(job.ending) if job.ending else None
    has_culprit = bool(lost) or any(end.has_failed and not end.was_stopped_by_us for end in ends)
    if stopped_for is None and not has_culprit:
        return Failure(Cause.START_FAILED, job.reason)
    if job.ending is Ending.OWNER:
        return Failure(Cause.PREEMPTED, job.reason)  # which says whose
    return classify(ends, lost=lost, stopped_for=stopped_for)


def _cause_of_loss(status: RunStatus) -> Cause:
    if status.was_rebooted:
        return Cause.NODE_REBOOTED
    return Cause.NODE_LOST if status.outcome == "lease-expired" else Cause.SUPERVISOR_LOST


def _not_started(node: str, status: RunStatus) -> Failure:
    reason = f"{node_of(node)}: {status.reason}"
    if status.is_disk_full:
        return Failure(Cause.DISK_FULL, reason, status.failed_rank, node, hint=disk_hint(node))
    if not status.is_programs_fault:
        return Failure(Cause.START_FAILED, reason, status.failed_rank, node)
    code = next((rank.code for rank in status.ranks if rank.rank == status.failed_rank), None)
    hint = "is it there on the node, and may it be executed? See: ugro exec"
    return Failure(Cause.RANK_FAILED, reason, status.failed_rank, node, code or 127, hint=hint)


def _rank_ends(node: str, status: RunStatus, offset_s: float) -> list[RankEnd]:
    return [
        RankEnd(
            rank=rank.rank,
            node=node,
            exit_code=rank.code,
            signal=rank.signal,
            ended_unix_s=rank.ended_at or 0.0,
            clock_offset_s=offset_s,
            last_lines=status.tail if rank.rank == status.failed_rank else (),
            was_oom_killed=rank.is_oom,
            reached_bytes=rank.reached_bytes,
            was_stopped_by_us=status.outcome == "stopped" and not rank.was_lost,
            was_disk_full=status.is_disk_full and rank.rank == status.failed_rank,
        )
        for rank in status.ranks
    ]
