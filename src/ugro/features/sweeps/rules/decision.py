"""What a sweep does next: another trial, wait, or end, with the reason. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ugro.features.sweeps.model import Budget, Point, SweepState, Trial, TrialState
from ugro.features.sweeps.rules.spec import Metric, Pruning, SweepSpec, grid_size
from ugro.kernel.support.quantities import format_duration

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


# --- history ----------------------------------------------------------------------------------------------------------
# The values of a trial's metric, over all its attempts: as if it had never been interrupted. Pure.


MOST_KEPT = 500  # of a trial that has ended

Series = Mapping[tuple[int, int], Sequence[tuple[int, float]]]  # steps and values, by attempt and rank


def merged(series: Series) -> tuple[Point, ...]:
    """Of each attempt, the first rank that has values. An attempt that goes back to a checkpoint replaces what it
    repeats. NaN and infinities are left out."""
    chosen: dict[int, int] = {}
    for attempt, rank in series:
        chosen[attempt] = min(rank, chosen.get(attempt, rank))
    found: dict[int, float] = {}
    for attempt, rank in sorted(chosen.items()):
        points = [(step, value) for step, value in series[attempt, rank] if math.isfinite(value)]
        if points:
            begin = min(step for step, _ in points)
            found = {step: value for step, value in found.items() if step < begin}
            found.update(points)
    return tuple(Point(step, found[step]) for step in sorted(found))


def joined(stored: Series, heard: Series) -> Series:
    """Of each attempt and rank what is longer: the same values are heard sooner, and stored for longer."""
    return {**stored, **{key: points for key, points in heard.items() if len(points) > len(stored.get(key, ()))}}


def score_of(points: Sequence[Point], metric: Metric) -> float | None:
    """What a trial counts by."""
    if metric.is_mean:
        return math.fsum(point.value / len(points) for point in points) if points else None  # of values up to 10³⁰⁸
    return best_of(points, metric.sign)


def best_of(points: Sequence[Point], sign: int, last_step: int | None = None) -> float | None:
    """The best value up to that step; ``sign`` -1: larger is better."""
    values = [point.value for point in points if last_step is None or point.step <= last_step]
    return min(values, key=lambda value: sign * value) if values else None


def thinned(points: Sequence[Point], sign: int) -> tuple[Point, ...]:
    """At most so many, with the first, the best and the last one."""
    if len(points) <= MOST_KEPT:
        return tuple(points)
    best = min(range(len(points)), key=lambda at: sign * points[at].value)
    every = (len(points) - 1) / (MOST_KEPT - 2)
    chosen = {round(number * every) for number in range(MOST_KEPT - 1)} | {best}
    return tuple(points[at] for at in sorted(chosen))


# --- pruning ----------------------------------------------------------------------------------------------------------
# Which running trials end early. Trials are compared at equal steps, never at equal times. Pure.
#
# Every running trial is judged again whenever others reach its step: one that was first on a fast device, and passed
# because there was nothing to compare it with, is not favoured for long.


_PARTS = 100  # without bands, the first one is this part of a complete trial
_COMPARED = frozenset({TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED})


@dataclass(frozen=True, slots=True)
class Prune:
    number: int
    reason: str


def to_prune(rule: Pruning, metric: Metric, trials: Iterable[Trial]) -> list[Prune]:
    known = [trial for trial in trials if trial.state in _COMPARED and trial.history]
    running = [trial for trial in known if trial.state is TrialState.RUNNING]
    judge = _JUDGES.get(rule.kind)
    if judge is None:  # Optuna judges
        return []
    found = [(trial, judge(rule, metric, trial, known)) for trial in running]
    return [Prune(trial.number, reason) for trial, reason in found if reason is not None]


def _hyperband(rule: Pruning, metric: Metric, trial: Trial, known: Sequence[Trial]) -> str | None:
    """W&B's rule: a band is so many values of the metric; the best so far must be among the first 1/eta there."""
    band = max((band for band in rule.bands if band <= len(trial.history)), default=None)
    if band is None:
        return None
    found = (_value_at(one, band, trial.history[band - 1].step) for one in known)
    reached = [value for value in found if value is not None]
    own = trial.history[band - 1].value if rule.is_strict else best_of(trial.history, metric.sign)
    assert own is not None
    return _compared(own, reached, int(len(reached) / rule.eta), metric, f"{band} values")


def _value_at(trial: Trial, band: int, step: int) -> float | None:
    """Its value of that number. A long trial that has ended has kept only some of them: that step stands for it."""
    if not trial.is_open and len(trial.history) >= MOST_KEPT - 1:
        last = next((point for point in reversed(trial.history) if point.step <= step), None)
        return last.value if last is not None and trial.history[-1].step >= step else None
    return trial.history[band - 1].value if len(trial.history) >= band else None


def _asha(rule: Pruning, metric: Metric, trial: Trial, known: Sequence[Trial]) -> str | None:
    newest, bracket = trial.history[-1].step, trial.number % rule.brackets
    bands = (rule.bands or _bands(rule, known))[bracket:]
    known = [one for one in known if one.number % rule.brackets == bracket]
    band = max((band for band in bands if band <= newest), default=None)
    if band is None:
        return None
    reached = [best_of(one.history, metric.sign, band) for one in known if one.history[-1].step >= band]
    own = best_of(trial.history, metric.sign, band)
    if own is None:
        return None
    values = [value for value in reached if value is not None]
    return _compared(own, values, max(1, int(len(values) / rule.eta)) - 1, metric, f"step {band}")


def _compared(own: float, reached: Sequence[float], place: int, metric: Metric, where: str) -> str | None:
    """``place``: of the worst value that goes on, from the best one."""
    threshold = sorted(reached, key=lambda value: metric.sign * value)[place]
    if metric.sign * own <= metric.sign * threshold:
        return None
    return f"{metric.name} {own:.4g} at {where}: {threshold:.4g} or better goes on ({len(reached)} trials compared)"


def _bands(rule: Pruning, known: Sequence[Trial]) -> tuple[int, ...]:
    """From the first trial that ran to its end: before that, nobody knows how long one is."""
    first = next((trial for trial in known if trial.state is TrialState.COMPLETE), None)
    if first is None:
        return ()
    last = first.history[-1].step
    bands, band = list[int](), max(1.0, last / _PARTS)
    while band < last:
        bands.append(int(band))
        band *= rule.eta
    return tuple(bands)


def _median(rule: Pruning, metric: Metric, trial: Trial, known: Sequence[Trial]) -> str | None:
    step = trial.history[-1].step
    complete = [one for one in known if one.state is TrialState.COMPLETE and one.history[-1].step >= step]
    values = [value for one in complete if (value := best_of(one.history, metric.sign, step)) is not None]
    own = best_of(trial.history, metric.sign)
    if len(values) < rule.startup or own is None:
        return None
    middle = statistics.median(values)
    if metric.sign * own <= metric.sign * middle:
        return None
    return f"{metric.name} {own:.4g} at step {step}: the median of {len(values)} trials is {middle:.4g}"


_JUDGES = {"hyperband": _hyperband, "asha": _asha, "median": _median}


# --- study ------------------------------------------------------------------------------------------------------------
# How many workers a study gets, and when it is over. Pure.


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
    if (reason := _study_failures(view)) is not None:
        return Decision(Act.STOP, reason)
    if (reason := _study_enough(view)) is not None:
        return Decision(Act.WAIT if opened else Act.END, reason)
    left = _MOST_WORKERS if view.limit is None else view.limit - view.ended
    most = min(left, _MOST_WORKERS if view.budget.parallel is None else view.budget.parallel)
    if opened >= most:
        return Decision(Act.WAIT, f"{opened} workers at once")
    if view.budget.parallel is None and view.waiting:
        return Decision(Act.WAIT, "the next worker waits for a device")
    return Decision(Act.TRY)


def _study_enough(view: StudyView) -> str | None:
    if is_full(view):
        return f"all {view.limit} trials were made"
    if (reason := used_up(view.budget, view.workers, view.elapsed_s)) is not None:
        return reason
    by_themselves = sum(worker.state is _ENDED_WELL for worker in view.workers)
    return "the script has ended" if by_themselves > view.budget.workers_ended else None


def _study_failures(view: StudyView) -> str | None:
    failed = [worker for worker in view.workers if worker.state is TrialState.FAILED][view.budget.failed_before :]
    usual = _MOST_FAILURES if view.ended else _FIRST_FAILURES - 1
    most = usual if view.budget.max_failed is None else view.budget.max_failed
    return f"{len(failed)} workers failed: {failed[-1].reason}" if len(failed) > most else None
