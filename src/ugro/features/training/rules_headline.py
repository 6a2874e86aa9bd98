"""How far a training is and how long it still takes, from what it has reported. Pure.

The total comes from the first of these that fits: what ``ugro.train`` records, a metric such as ``max_steps``, an
argument of the command, the ``epoch`` metric with a number of epochs, a progress bar at the end of the log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import fmean, median

from ugro.features.training.model import DeviceUse, Headline, JobEnergy, JobProgress, LossLine, Speed
from ugro.kernel.links.model import Gpu
from ugro.kernel.support.quantities import format_cost, format_duration, format_energy
from ugro.kernel.telemetry.model import TOTAL_STEPS, is_internal
from ugro.kernel.telemetry.rules import number

# --- bars -------------------------------------------------------------------------------------------------------------
# Progress bars at the end of a log, as tqdm draws them: ``Train:  45%|████▌    | 450/1000 [01:02<01:15, 7.2it/s]``.


_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# All lengths are bounded, and nothing before the percentage is searched for: a log may have any line.
_AMOUNT = r"\d[\d.,]{0,20}[kMGT]?"
_BAR = re.compile(
    rf"\d{{1,3}}%\|[^|]{{0,400}}\|\s{{0,20}}(?P<done>{_AMOUNT})\w{{0,10}}/(?P<total>{_AMOUNT})\w{{0,10}}"
    r"\s{0,20}\[(?P<passed>[\d:]{1,20})<(?P<left>[\d:?]{1,20})"
)
_SCALE = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Bars of a part of the work: of one epoch, of an evaluation, of the preparation of data.
_PART = re.compile(r"\d|epoch|eval|val\b|valid|test|load|download|map|token|predict|fetch", re.IGNORECASE)
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Bar:
    what: str  # its name, or ""
    done: float
    total: float
    passed_s: float
    left_s: float | None  # None: not known yet

    @property
    def is_complete(self) -> bool:
        return self.done >= self.total

    @property
    def is_part(self) -> bool:
        return _PART.search(self.what) is not None


def newest_bar(log_tail: str) -> Bar | None:
    """The last state of the bar that has been shown for the longest time, since inner ones start again and again.

    One that is complete counts only if there is no other.
    """
    latest: dict[tuple[str, float], Bar] = {}
    for line in re.split(r"[\r\n]", _ESCAPE.sub("", log_tail)):
        if (bar := _bar(line)) is not None:
            latest[bar.what, bar.total] = bar
    return max(latest.values(), key=lambda bar: (not bar.is_complete, bar.passed_s), default=None)


def _bar(line: str) -> Bar | None:
    found = _BAR.search(line)
    if found is None:
        return None
    done, total, passed_s = _amount(found["done"]), _amount(found["total"]), _seconds(found["passed"])
    if done is None or not total or done > total or passed_s is None:
        return None
    what = line[: found.start()].rpartition("|")[2].strip().removesuffix(":").rstrip()[-_LONGEST_NAME:]
    return Bar(what, done, total, passed_s, _seconds(found["left"]))


def _amount(text: str) -> float | None:
    scale = _SCALE.get(text[-1], 1.0)
    try:
        return float(text.rstrip("kMGT").replace(",", "")) * scale
    except ValueError:
        return None


def _seconds(text: str) -> float | None:
    """``01:15``, ``1:02:03``; ``?`` is not known."""
    parts = text.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds


# --- headline ---------------------------------------------------------------------------------------------------------
# The headline of a job from its curves: which of them say what, and in which words. Pure.


OWN_STEP = "profile/step_s"  # of ugro.train, for every step
OWN_SAMPLES = "profile/samples"
SPEEDS = {
    "samples_per_s": "samples/s", "samples_per_second": "samples/s", "train_samples_per_second": "samples/s",
    "tokens_per_s": "tokens/s", "tokens_per_second": "tokens/s", "throughput": "per second",
}  # fmt: skip
_RECENT = 5  # bins
_GAP = 5  # times the usual distance of two steps


def step_name(counts: Sequence[tuple[str, int]]) -> str | None:
    """The metric that tells of steps: the one with the most records, by name and number of records."""
    if any(name == OWN_STEP for name, _ in counts):
        return OWN_STEP
    own = [(count, name) for name, count in counts if not is_internal(name)]
    return max(own)[1] if own else None


def loss_line(name: str, steps: Sequence[int], values: Sequence[float | None], last: float | None) -> LossLine:
    """``values`` at ``steps`` are the small curve; ``last`` is the last finite one, which is old if others followed."""
    now = last if values and values[-1] is not None else None
    return LossLine(name, now, None, _with_gaps(steps, [*values[:-1], now]))


def _with_gaps(steps: Sequence[int], values: Sequence[float | None]) -> tuple[float | None, ...]:
    """With nothing where steps were left out, as in the charts: there no line is drawn."""
    distances = [after - before for before, after in pairwise(steps)]
    usual = sorted(distances)[len(distances) // 2] if len(distances) > 2 else math.inf
    found: list[float | None] = []
    for value, distance in zip(values, [0, *distances], strict=False):
        found += [None, value] if distance > _GAP * usual else [value]
    return tuple(found)


def speed_of(samples: Sequence[float | None], seconds: Sequence[float | None], *, is_final: bool) -> Speed | None:
    """Of ``ugro.train``: from the samples and the length of the newest steps, or of all."""
    count, length_s = _mean(samples, is_final=is_final), _mean(seconds, is_final=is_final)
    return Speed(count / length_s, "samples/s") if count is not None and length_s else None


def logged_speed(name: str, values: Sequence[float | None], *, is_final: bool) -> Speed | None:
    found = _mean(values, is_final=is_final)
    return None if found is None else Speed(found, SPEEDS[name])


def computing(
    step_s: Sequence[float | None], own: Sequence[Sequence[float | None]], data: Sequence[Sequence[float | None]],
    *, is_final: bool,
) -> DeviceUse | None:  # fmt: skip
    """The share of time in which ranks compute: their own time without waiting for data, by rank."""
    whole_s = _mean(step_s, is_final=is_final)
    owns = [mean for values in own if (mean := _mean(values, is_final=is_final)) is not None]
    waits = [mean for values in data if (mean := _mean(values, is_final=is_final)) is not None]
    if not whole_s or not owns:
        return None
    busy_s = _even(owns) - (_even(waits) if waits else 0.0)
    return DeviceUse(computing=min(1.0, max(0.0, busy_s / whole_s)))


def _mean(values: Sequence[float | None], *, is_final: bool) -> float | None:
    """Of the newest bins while a job runs, so that it shows a change; of all bins of an ended one."""
    known = [value for value in values if value is not None]
    chosen = known if is_final else known[-_RECENT:]
    return _even(chosen) if chosen else None


def _even(values: Sequence[float]) -> float:
    """Their mean. A job may write any number: the sum of two of them may be more than a float holds."""
    return math.fsum(value / len(values) for value in values)


def gpu_use(gpus: Sequence[Gpu]) -> DeviceUse | None:
    """Of the GPUs that a job has; unreadable ones count, but say nothing."""
    uses = [gpu.use_ratio for gpu in gpus if gpu.use_ratio is not None]
    memories = [ratio for gpu in gpus if (ratio := gpu.memory_ratio) is not None]
    if not uses and not memories:
        return None
    return DeviceUse(len(gpus), fmean(uses) if uses else None, fmean(memories) if memories else None)


def in_one_line(headline: Headline) -> str:
    parts = [*_progress_words(headline.progress), *_loss_words(headline)]
    if headline.speed is not None:
        style = ",.0f" if headline.speed.value >= 1000 else ".4g"
        parts.append(f"{headline.speed.value:{style}} {headline.speed.name}")
    parts += _device_words(headline.devices)
    parts += _energy_words(headline.energy)
    if headline.is_final and headline.duration_s is not None:
        parts.insert(0, f"took {format_duration(headline.duration_s)}")
    return " · ".join(parts)


def _progress_words(found: JobProgress | None) -> list[str]:
    if found is None:
        return []
    share = "" if found.share is None else f" ({100 * found.share:.0f} %)"
    return [f"{found.words}{share}", *([found.left_words] if found.left_words else [])]


def _loss_words(headline: Headline) -> list[str]:
    loss = headline.loss
    if loss is None:
        return []
    last = "not a number" if loss.last is None else f"{loss.last:.4g}"
    best = f" (best {loss.best:.4g})" if loss.best is not None and headline.is_final else ""
    return [f"{loss.name} {last}{best}"]


def _energy_words(energy: JobEnergy | None) -> list[str]:
    if energy is None:
        return []
    cost = "" if energy.cost is None else f" ({format_cost(energy.cost, energy.currency or '')})"
    return [f"{format_energy(energy.joules)}{cost}"]


def _device_words(use: DeviceUse | None) -> list[str]:
    if use is None:
        return []
    if use.computing is not None:
        return [f"computing {100 * use.computing:.0f} % of the time"]
    memory = "" if use.memory is None else f", memory {100 * use.memory:.0f} %"
    return [] if use.use is None else [f"GPU use {100 * use.use:.0f} %{memory}"]


# --- progress ---------------------------------------------------------------------------------------------------------


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
_PROGRESS_RECENT = 20  # intervals that the speed is taken from
_STALL = 5.0  # times the usual pace
_RECURS = 3  # stalls among the recent intervals, from which on they count
_LEAST_SILENCE_S = 60.0
_NOT_KNOWN = "total not known"
_PROGRESS_BAR = "progress bar in the log"
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
    intervals = _intervals(track)[-_PROGRESS_RECENT:]
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
    usual = max((length for _, length in _intervals(known.steps)[-_PROGRESS_RECENT:]), default=0.0)
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
        return JobProgress(words, _TOO_EARLY, bar.done, bar.total, source=_PROGRESS_BAR)
    left = f"{format_duration(round(bar.left_s))} left"
    if bar.is_part:  # what comes after it is not known
        return JobProgress(words, f"{left} of this part", bar.done, bar.total, source=_PROGRESS_BAR)
    return JobProgress(words, left, bar.done, bar.total, bar.left_s, _PROGRESS_BAR)
