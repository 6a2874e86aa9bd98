"""Which running trials end early. Trials are compared at equal steps, never at equal times. Pure.

Every running trial is judged again whenever others reach its step: one that was first on a fast device, and passed
because there was nothing to compare it with, is not favoured for long.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.core.sweep import Trial, TrialState
from ugro.policy.sweep.history import MOST_KEPT, best_of
from ugro.policy.sweep.spec import Metric, Pruning

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
