"""What a sweep does next: another trial, wait, or end, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ugro.core.support.quantity import format_duration
from ugro.core.sweep import Budget, SweepState, Trial, TrialState
from ugro.policy.sweep.space import grid_size
from ugro.policy.sweep.spec import Metric, SweepSpec

_FIRST_FAILURES = 3  # if nothing has succeeded, the next one fails, too
_WENT_WELL = frozenset({TrialState.COMPLETE, TrialState.PRUNED})
_BAD = frozenset({TrialState.FAILED})
_MOST_DONE = 0.9  # of a trial that runs longer than others
_KEPT_QUEUED = 1  # beyond what runs: no device waits for a decision, and faster ones take more


class Act(StrEnum):
    TRY = "try"
    WAIT = "wait"
    END = "end"  # in good order
    STOP = "stop"  # a person should look


@dataclass(frozen=True, slots=True)
class View:
    spec: SweepSpec
    budget: Budget
    trials: Sequence[Trial]
    waiting: int = 0  # trials whose jobs have not started
    leaving: int = 0  # trials that were asked to end: the next one is made ready meanwhile
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    act: Act
    reason: str = ""


def decide(view: View) -> Decision:
    failures = _failures(view)
    if failures is not None:
        return Decision(Act.STOP, failures)
    opened = sum(trial.is_open for trial in view.trials)
    if (reason := _enough(view)) is not None:
        return Decision(Act.WAIT if opened else Act.END, reason)
    parallel = view.budget.parallel
    if parallel is not None and opened - view.leaving >= parallel:
        return Decision(Act.WAIT, f"{opened - view.leaving} trials at once")
    if parallel is None and view.waiting >= _KEPT_QUEUED:
        return Decision(Act.WAIT, "the next trial waits for a device")
    return Decision(Act.TRY)


def outcome(decision: Decision, trials: Sequence[Trial]) -> tuple[SweepState, str]:
    """Returns the state of a sweep that is over by this decision, and the reason."""
    lost = [trial for trial in trials if trial.state in (TrialState.FAILED, TrialState.INFEASIBLE)]
    if not lost or any(trial.state in _WENT_WELL for trial in trials):
        return SweepState.DONE if decision.act is Act.END else SweepState.STOPPED, decision.reason
    said = f"{decision.reason}; none succeeded: {lost[-1].reason}" if decision.act is Act.END else decision.reason
    return SweepState.FAILED, said


def predecessor(parallel: int | None, opened: int, leaving: Sequence[int], taken: Collection[int]) -> int | None:
    """The job whose end a new trial waits for, so that never more run at once than were asked for. None: it need not.

    ``opened``: other trials that have not ended; ``leaving``: the jobs of those that were asked to end; ``taken``: the
    jobs that others wait for.
    """
    if parallel is None or opened < parallel:
        return None
    return next((job for job in leaving if job not in taken), None)


def total(spec: SweepSpec, budget: Budget) -> int | None:
    """How many trials there will be at most; None: not limited."""
    limits = [limit for limit in (budget.trials, spec.run_cap if budget.trials is None else None) if limit is not None]
    size = grid_size(spec.parameters)
    return min([*limits, *([size] if size is not None else [])], default=None)


def best_trial(metric: Metric | None, trials: Sequence[Trial]) -> Trial | None:
    """Of those that ended, or still run; the first of equals."""
    if metric is None:
        return None
    measured = [trial for trial in trials if trial.best is not None and _is_comparable(metric, trial)]
    return min(measured, key=lambda trial: metric.sign * (trial.best or 0.0), default=None)


def _is_comparable(metric: Metric, trial: Trial) -> bool:
    """The mean of some of the values says little about the mean of all."""
    return not metric.is_mean or trial.state is TrialState.COMPLETE


def eta_s(view: View) -> float | None:
    """If trials end as fast as until now. Those that run count for the part of a trial that they have run.

    A result from the cache took no time, and says nothing about the others.
    """
    most = total(view.spec, view.budget)
    left_s = None if view.budget.time_s is None else max(0.0, view.budget.time_s - view.elapsed_s)
    ended = [trial for trial in view.trials if not trial.is_open and trial.state is not TrialState.STOPPED]
    took_s = [trial.took_s for trial in ended if trial.took_s]
    if most is None or not took_s or view.elapsed_s <= 0:
        return None
    usual_s = sum(took_s) / len(took_s)
    parts = sum(min((trial.took_s or 0.0) / usual_s, _MOST_DONE) for trial in view.trials if trial.is_open)
    found_s = max(0.0, most - len(ended) - parts) * view.elapsed_s / (len(took_s) + parts)
    return found_s if left_s is None else min(found_s, left_s)


def _enough(view: View) -> str | None:
    trials, budget, metric = view.trials, view.budget, view.spec.metric
    counted = [trial for trial in trials if trial.state is not TrialState.STOPPED]
    best = best_trial(metric, [trial for trial in trials if not trial.is_open])
    if best is not None and metric is not None and _is_reached(metric, best.best):
        return f"trial {best.number} reached the target: {metric.name} {best.best:.6g}"
    limit = budget.trials if budget.trials is not None else view.spec.run_cap
    if limit is not None and len(counted) >= limit:
        return f"all {limit} trials were made"
    size = grid_size(view.spec.parameters)
    if size is not None and len({trial.settings for trial in counted}) >= size:
        return f"every point was tried: {size}"
    return used_up(budget, trials, view.elapsed_s) or _no_improvement(view, best)


def _is_reached(metric: Metric, value: float | None) -> bool:
    return value is not None and metric.target is not None and metric.sign * value <= metric.sign * metric.target


def used_up(budget: Budget, trials: Sequence[Trial], elapsed_s: float) -> str | None:
    """Which of the limits on time is reached; None: none."""
    if budget.time_s is not None and elapsed_s >= budget.time_s:
        return f"its time of {format_duration(budget.time_s)} is over"
    used_s = sum((trial.took_s or 0.0) * trial.gpus for trial in trials) / budget.trials_per_gpu
    if budget.gpu_s is not None and used_s >= budget.gpu_s:
        return f"its {budget.gpu_s / 3600:g} GPU-hours are used up"
    return None


def _no_improvement(view: View, best: Trial | None) -> str | None:
    most = view.budget.no_improvement
    if most is None or best is None:
        return None
    counted = [trial for trial in view.trials if not trial.is_open and trial.state is not TrialState.STOPPED]
    later = sum(trial.number > best.number for trial in counted)
    return f"no improvement in {later} trials" if later >= most else None


def _failures(view: View) -> str | None:
    failed = [trial for trial in view.trials if trial.state in _BAD][view.budget.failed_before :]
    went_well = any(trial.state in _WENT_WELL for trial in view.trials)
    most = view.budget.max_failed
    if most is not None and len(failed) > most:
        return f"{len(failed)} trials failed, and {most} may: {failed[-1].reason}"
    if most is None and not went_well and len(failed) >= _FIRST_FAILURES:
        return f"the first {len(failed)} trials failed: {failed[-1].reason}"
    return None
