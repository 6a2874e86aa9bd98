"""How far a training is and how long it still takes, from what it has reported. Pure.

The total comes from the first of these that fits: what ``ugro.train`` records, a metric such as ``max_steps``, an
argument of the command, the ``epoch`` metric with a number of epochs, a progress bar at the end of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import median

from ugro.core.headline import JobProgress
from ugro.core.metrics import TOTAL_STEPS
from ugro.core.support.quantity import format_duration
from ugro.policy.experiments.parameters import number
from ugro.policy.training.bars import Bar, newest_bar

PER_EPOCH = "progress/steps_per_epoch"
EPOCH = "epoch"
TOTAL_METRICS = ("total_steps", "max_steps", "num_steps", "train/total_steps", "train/max_steps")
EPOCH_METRICS = ("progress/epochs", "total_epochs", "max_epochs", "num_epochs", "num_train_epochs", "epochs")
TOLD = (TOTAL_STEPS, PER_EPOCH, *TOTAL_METRICS, *EPOCH_METRICS)  # the metrics whose last values are of use

_STEP_ARGUMENTS = (
    "max_steps", "total_steps", "num_steps", "train_steps", "max_train_steps", "num_train_steps", "training_steps",
    "max_iters", "num_iters", "total_iters", "max_iterations", "num_iterations", "train_iters",
)  # fmt: skip
_MAYBE_PER_EPOCH = ("steps", "iters", "iterations")  # with a number of epochs they may count the steps of one
_EPOCH_ARGUMENTS = (
    "epochs",
    "num_epochs",
    "max_epochs",
    "total_epochs",
    "n_epochs",
    "train_epochs",
    "num_train_epochs",
)

_LARGEST = 1e15  # more is no number of steps
_RECENT = 20  # intervals that the speed is taken from
_STALL = 5.0  # times the usual pace
_RECURS = 3  # stalls among the recent intervals, from which on they count
_LEAST_SILENCE_S = 60.0
_NOT_KNOWN = "total not known"
_BAR = "progress bar in the log"
_TOO_EARLY = "time left not known yet"


@dataclass(frozen=True, slots=True)
class Track:
    """When which step was reached, in the order of steps, and a value at each."""

    steps: Sequence[float]
    times: Sequence[float]  # unix seconds
    values: Sequence[float | None] = ()
    count: int = 0  # points that were recorded; a track may have fewer


@dataclass(frozen=True, slots=True)
class Known:
    now: float  # unix seconds
    steps: Track | None = None
    is_from_zero: bool = False  # the first step is number 0, so one more was done
    epochs: Track | None = None  # the metric ``epoch``
    told: Mapping[str, float] = field(default_factory=dict)  # last values of the metrics in TOLD
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the command
    log_tail: str = ""
    is_final: bool = False  # it does not run, or not any more
    has_succeeded: bool = False
    limit_left_s: float | None = None  # until its time limit ends it


def progress(known: Known) -> JobProgress | None:
    """None if the job has reported no step."""
    found = _measured(known)
    if found is None:
        return None
    if known.has_succeeded and found.share is not None and found.share < 1:  # it need not log each step
        return replace(found, words=f"done, last logged {found.words}", done=found.total)
    limit_s = known.limit_left_s
    if found.left_s is not None and limit_s is not None and round(found.left_s) > round(limit_s):
        needs, leaves = format_duration(round(found.left_s)), format_duration(round(max(0.0, limit_s)))
        return replace(found, left_words=f"needs {needs}, and its time limit leaves {leaves}")
    return found


def _measured(known: Known) -> JobProgress | None:
    done = _done(known)
    bar = None if known.is_final else newest_bar(known.log_tail)
    if bar is not None and bar.is_complete and (bar.is_part or done is not None):
        bar = None  # of what came before the training, such as a download
    found = _by_totals(known, done)
    if bar is not None and (found is None or _knows_more(bar, found)):
        return _by_bar(bar)
    if found is not None or done is None:
        return found
    silent_s = _silent_s(known)
    left = "" if known.is_final else _silence(silent_s) or _NOT_KNOWN
    return JobProgress(f"step {done:,}", left, done, stalled_s=silent_s)


def _by_totals(known: Known, done: int | None) -> JobProgress | None:
    if done is not None and (total := _total(known, done)) is not None:
        return _progress(known, f"step {done:,} of {total[0]:,}", (done, total[0]), known.steps, total[1])
    return _by_epochs(known, done)


def _knows_more(bar: Bar, found: JobProgress) -> bool:
    """Records may come without times; a bar of the whole has measured them itself."""
    return found.left_words == _TOO_EARLY and bar.left_s is not None and not bar.is_part


def seconds_per_step(track: Track) -> float | None:
    """The recent pace. A pause that came once or twice is left out; one that recurs, such as saving, counts.

    Records without times have the times at which they arrived, in batches. Returns None if that says too little.
    """
    intervals = _intervals(track)[-_RECENT:]
    if len(intervals) < 2:
        return None
    usual = median(length / steps for steps, length in intervals)
    stalls = sum(length / steps > _STALL * usual for steps, length in intervals)
    if stalls < _RECURS:
        intervals = [(n, usual * n if length > _STALL * usual * n else length) for n, length in intervals]
    return sum(length for _, length in intervals) / sum(steps for steps, _ in intervals)


def mean_seconds_per_step(track: Track, ran_s: float) -> float | None:
    """Returns the pace of a whole attempt whose records came in batches; None if they have times of their own."""
    steps = track.steps
    if len(steps) < 2 or len(set(track.times)) == len(steps) or ran_s <= 0:
        return None
    is_from_start = steps[0] <= steps[1] - steps[0]  # else it may have resumed
    return ran_s / (steps[-1] - (0 if is_from_start else steps[0]))


# --- totals -----------------------------------------------------------------------------------------------------


def _done(known: Known) -> int | None:
    if known.steps is None or not known.steps.steps:
        return None
    return int(known.steps.steps[-1]) + known.is_from_zero


def _total(known: Known, done: int) -> tuple[int, str] | None:
    """A total below what was done is about something else."""
    epochs, of_epochs = _epochs(known)
    candidates = [(known.told.get(TOTAL_STEPS), "recorded by the training")]
    candidates += [(known.told.get(name), f"metric {name}") for name in TOTAL_METRICS]
    names = _STEP_ARGUMENTS if epochs else (*_STEP_ARGUMENTS, *_MAYBE_PER_EPOCH)
    candidates += [_argument(known.parameters, names)]
    if epochs and (per_epoch := known.told.get(PER_EPOCH)):
        candidates.append((epochs * per_epoch, of_epochs))
    return next(((round(total), source) for total, source in candidates if total and done <= total < _LARGEST), None)


def _epochs(known: Known) -> tuple[float | None, str]:
    for name in EPOCH_METRICS:
        if 0 < known.told.get(name, 0) < _LARGEST:
            return known.told[name], f"metric {name}"
    return _argument(known.parameters, _EPOCH_ARGUMENTS)


def _argument(parameters: Mapping[str, str], names: Sequence[str]) -> tuple[float | None, str]:
    """``--max-steps 100``, ``trainer.max_steps=100`` and MAX_STEPS=100 are the same."""
    for given, text in parameters.items():
        plain = given.rpartition(".")[2].replace("-", "_").lower()
        value = number(text.replace("_", ""))
        if plain in names and value is not None and 0 < value < _LARGEST:
            return value, f"argument {given}"
    return None, ""


# --- by steps ---------------------------------------------------------------------------------------------------


def _progress(known: Known, words: str, part: tuple[float, float], track: Track | None, source: str) -> JobProgress:
    done, total = part
    if known.is_final:
        return JobProgress(words, "", done, total, source=source)
    silent_s = _silent_s(known)
    if silent_s is not None:
        return JobProgress(words, _silence(silent_s), done, total, source=source, stalled_s=silent_s)
    pace_s = seconds_per_step(track) if track is not None else None
    if pace_s is None or track is None:
        return JobProgress(words, _TOO_EARLY, done, total, source=source)
    # What has passed since the last record is already gone, but not more than until the next one.
    last_s = _intervals(track)[-1][1]
    left_s = max(0.0, (total - done) * pace_s - min(max(0.0, known.now - track.times[-1]), last_s))
    return JobProgress(words, f"{format_duration(round(left_s))} left", done, total, left_s, source)


def _intervals(track: Track) -> list[tuple[float, float]]:
    """Steps and seconds between neighbours. Where time does not advance, steps count together."""
    moments = groupby(zip(track.steps, track.times, strict=True), key=lambda pair: pair[1])
    pairs = [list(of_one)[-1] for _, of_one in moments]  # what arrived together took the time since what arrived before
    found = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pairs)]
    return [(steps, length) for steps, length in found if steps > 0 and length > 0]


def _silent_s(known: Known) -> float | None:
    """Seconds since the last record, if that is far longer than between the last ones."""
    if known.is_final or known.steps is None or not known.steps.times:
        return None
    usual = max((length for _, length in _intervals(known.steps)[-_RECENT:]), default=0.0)
    silent_s = known.now - known.steps.times[-1]
    is_timed = known.steps.times[-1] > 0
    return silent_s if is_timed and silent_s > max(_LEAST_SILENCE_S, _STALL * usual) else None


def _silence(silent_s: float | None) -> str:
    return "" if silent_s is None else f"no step for {format_duration(round(silent_s))}"


# --- by epochs --------------------------------------------------------------------------------------------------


def _by_epochs(known: Known, step: int | None) -> JobProgress | None:
    track = known.epochs
    total, source = _epochs(known)
    pairs = [] if track is None else [(at, epoch) for at, epoch in enumerate(track.values) if epoch is not None]
    if track is None or not pairs or not total or pairs[-1][1] > total:
        return None
    first, last = pairs[0][1], pairs[-1][1]
    if any(epoch != int(epoch) for _, epoch in pairs):  # such as 2.37
        passed = Track([epoch for _, epoch in pairs], [track.times[at] for at, _ in pairs])
        return _progress(known, f"epoch {last:.2f} of {total:g}", (last, total), passed, source)
    base = 0 if first == 0 else 1
    at_step = "" if step is None else f", step {step:,}"
    words = f"epoch {last - base + 1:g} of {total:g}{at_step}"
    if track.count <= last - first + 1:  # one record for each epoch, at its end
        by_epoch = Track([epoch - base + 1 for _, epoch in pairs], [track.times[at] for at, _ in pairs])
        return _progress(known, words, (last - base + 1, total), by_epoch, source)
    over = last - first
    if not over or known.steps is None:
        return _progress(known, words, (last - base, total), None, source)
    began = next(track.steps[at] for at, epoch in pairs if epoch >= last)
    of_epoch = (began - track.steps[pairs[0][0]]) / over
    all_steps = track.steps[pairs[0][0]] + (total - (first - base)) * of_epoch
    return _progress(known, words, (min(known.steps.steps[-1], all_steps), all_steps), known.steps, source)


# --- by a bar in the log ----------------------------------------------------------------------------------------


def _by_bar(bar: Bar) -> JobProgress:
    what = f"{bar.what}: " if bar.what else ""
    words = f"{what}{bar.done:,.0f} of {bar.total:,.0f}"
    if bar.left_s is None:
        return JobProgress(words, _TOO_EARLY, bar.done, bar.total, source=_BAR)
    left = f"{format_duration(round(bar.left_s))} left"
    if bar.is_part:  # what comes after it is not known
        return JobProgress(words, f"{left} of this part", bar.done, bar.total, source=_BAR)
    return JobProgress(words, left, bar.done, bar.total, bar.left_s, _BAR)
