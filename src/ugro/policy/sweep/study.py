"""How many workers a study gets, and when it is over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ugro.core.sweep import Budget, Trial, TrialState
from ugro.policy.sweep.decision import Act, Decision, used_up

_FIRST_FAILURES = 3  # workers, before there is any value
_MOST_FAILURES = 20  # workers
_MOST_WORKERS = 64
_ENDED_WELL = TrialState.COMPLETE


@dataclass(frozen=True, slots=True)
class StudyView:
    workers: Sequence[Trial]
    budget: Budget
    limit: int | None = None  # of trials; None: the script has not said, or has none
    counted: int = 0  # trials that were begun or wait
    ended: int = 0
    waiting: int = 0  # workers whose jobs have not started
    elapsed_s: float = 0.0


def is_full(view: StudyView) -> bool:
    return view.limit is not None and view.ended >= view.limit


def is_closed(view: StudyView) -> bool:
    """No more trials are begun."""
    return used_up(view.budget, view.workers, view.elapsed_s) is not None


def decide_workers(view: StudyView) -> Decision:
    opened = sum(worker.is_open for worker in view.workers)
    if (reason := _failures(view)) is not None:
        return Decision(Act.STOP, reason)
    if (reason := _enough(view)) is not None:
        return Decision(Act.WAIT if opened else Act.END, reason)
    left = _MOST_WORKERS if view.limit is None else view.limit - view.ended
    most = min(left, _MOST_WORKERS if view.budget.parallel is None else view.budget.parallel)
    if opened >= most:
        return Decision(Act.WAIT, f"{opened} workers at once")
    if view.budget.parallel is None and view.waiting:
        return Decision(Act.WAIT, "the next worker waits for a device")
    return Decision(Act.TRY)


def _enough(view: StudyView) -> str | None:
    if is_full(view):
        return f"all {view.limit} trials were made"
    if (reason := used_up(view.budget, view.workers, view.elapsed_s)) is not None:
        return reason
    by_themselves = sum(worker.state is _ENDED_WELL for worker in view.workers)
    return "the script has ended" if by_themselves > view.budget.workers_ended else None


def _failures(view: StudyView) -> str | None:
    failed = [worker for worker in view.workers if worker.state is TrialState.FAILED][view.budget.failed_before :]
    usual = _MOST_FAILURES if view.ended else _FIRST_FAILURES - 1
    most = usual if view.budget.max_failed is None else view.budget.max_failed
    return f"{len(failed)} workers failed: {failed[-1].reason}" if len(failed) > most else None
