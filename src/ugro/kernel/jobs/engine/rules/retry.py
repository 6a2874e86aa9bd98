"""Whether a job is tried again after a failure, when, and where not. It knows counts, never processes.

What the machines did to a job is not held against it, up to a budget. What its program did is retried only as its
``retry`` says. An attempt that got further than the one before resets both counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ugro.kernel.jobs import model as job
from ugro.kernel.jobs.model import Cause, Failure
from ugro.kernel.support.quantities import format_duration

FREE_RETRIES = 5
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
GPU_PAUSE_S = 2.0  # by then the node has reported who has the GPU

# Caused by the infrastructure: does not count against the job's retries.
INFRASTRUCTURE = frozenset(
    {
        Cause.NODE_LOST,
        Cause.NODE_REBOOTED,
        Cause.SUPERVISOR_LOST,
        Cause.PORT_IN_USE,
        Cause.START_FAILED,
        Cause.KILLED,
    }
)
# No failure at all: the job waits for devices again, however often.
UNCOUNTED = frozenset({Cause.PREEMPTED, Cause.GPU_UNAVAILABLE})
# The next attempt would almost certainly fail the same way.
LASTING = frozenset(
    {
        Cause.IMPORT_ERROR,
        Cause.TIME_LIMIT,
        Cause.SETUP_FAILED,
        Cause.MISMATCH,
    }
)
# May succeed on another node.
_NODES_FAULT = frozenset(
    {
        Cause.NODE_LOST,
        Cause.NODE_REBOOTED,
        Cause.SUPERVISOR_LOST,
        Cause.START_FAILED,
        Cause.DISK_FULL,
        Cause.KILLED,
    }
)


@dataclass(frozen=True, slots=True)
class JobView:
    retry: job.Retry
    charged: int = 0  # retries used of ``retry.max_retries``
    free: int = 0  # retries used of the budget for infrastructure
    has_progressed: bool = False  # this attempt wrote a checkpoint newer than the one it began from
    has_checkpoint: bool = False
    has_other_nodes: bool = False  # the cluster has nodes that this attempt did not use


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry, with the updated counts."""

    not_before: float
    charged: int
    free: int
    reason: str
    avoid: tuple[str, ...] = ()  # nodes to use only when no others are free


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str
    hint: str | None = None


def after_failure(view: JobView, failure: Failure, now: float) -> Retry | GiveUp:
    charged, free = (0, 0) if view.has_progressed else (view.charged, view.free)
    words = _words_for(failure)
    if words & set(view.retry.never_on):
        return GiveUp(f"{failure.reason}; never retried after {failure.cause}, as it was submitted", failure.hint)
    if failure.cause in UNCOUNTED:
        pause_s = GPU_PAUSE_S if failure.cause is Cause.GPU_UNAVAILABLE else 0.0
        reason = f"{failure.reason}; it is tried again{_from(view)} when there is room"
        return Retry(now + pause_s, charged, free, reason)
    if _found_no_room(failure) and view.has_other_nodes and not free:
        # It did not start: another node may have room for code that is large, or that was placed by an older report.
        reason = f"{failure.reason}; it is tried on another node, if one has room"
        return Retry(now, charged, 1, reason, _avoid(failure))
    if failure.cause in INFRASTRUCTURE and free < FREE_RETRIES:
        return _free_retry(view, failure, charged, free + 1, now)
    return _charged_retry(view, failure, (charged, free), now)


def _free_retry(view: JobView, failure: Failure, charged: int, free: int, now: float) -> Retry:
    pause_s = _pause_s(free - 1)
    reason = (
        f"{failure.reason}; that is not the job's fault: it is tried again in {format_duration(pause_s)}{_from(view)}, "
        f"free of charge ({free} of {FREE_RETRIES})"
    )
    return Retry(now + pause_s, charged, free, reason, _avoid(failure))


def _charged_retry(view: JobView, failure: Failure, counts: tuple[int, int], now: float) -> Retry | GiveUp:
    charged, free = counts
    most = view.retry.max_retries
    if failure.cause not in INFRASTRUCTURE and not _is_retried(view.retry, failure):
        return GiveUp(_not_retried(view.retry, failure), failure.hint)
    if charged >= most:
        used = f"all {most} retries are used" if most else "it has no retries"
        spent = f" and the {FREE_RETRIES} free ones are used" if failure.cause in INFRASTRUCTURE else ""
        return GiveUp(f"{failure.reason}; {used}{spent}", failure.hint)
    # A disk without room for a start does not get any by asking again at once.
    pause_s = _pause_s(charged) if _found_no_room(failure) else 0.0
    when = f" in {format_duration(pause_s)}" if pause_s else ""
    reason = f"{failure.reason}; it is tried again{when}{_from(view)} (retry {charged + 1} of {most})"
    return Retry(now + pause_s, charged + 1, free, reason, _avoid(failure))


def _pause_s(before: int) -> float:
    """``before``: how many such pauses there were."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**before))


def _found_no_room(failure: Failure) -> bool:
    """It could not be started for want of space; a program that ran has an exit code."""
    return failure.cause is Cause.DISK_FULL and failure.exit_code is None


def _is_retried(retry: job.Retry, failure: Failure) -> bool:
    if retry.on:
        return bool(_words_for(failure) & set(retry.on))
    return failure.cause not in LASTING


def _not_retried(retry: job.Retry, failure: Failure) -> str:
    if retry.on:
        return f"{failure.reason}; retried only after {', '.join(retry.on)}, as it was submitted"
    if retry.max_retries:
        return f"{failure.reason}; that would happen again, so its retries are not used for {failure.cause}"
    return f"{failure.reason}; it has no retries"


def _words_for(failure: Failure) -> set[str]:
    """The words by which ``on`` and ``never_on`` can name it: its cause, or the exit code."""
    words = {str(failure.cause)}
    return words if failure.exit_code is None else words | {f"exit_code:{failure.exit_code}"}


def _avoid(failure: Failure) -> tuple[str, ...]:
    return (failure.node,) if failure.node and failure.cause in _NODES_FAULT else ()


def _from(view: JobView) -> str:
    return " from its last checkpoint" if view.has_checkpoint or view.has_progressed else ""
