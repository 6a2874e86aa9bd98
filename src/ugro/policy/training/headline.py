"""The headline of a job from its curves: which of them say what, and in which words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from ugro.core.energy import JobEnergy
from ugro.core.headline import DeviceUse, Headline, JobProgress, LossLine, Speed
from ugro.core.metrics import is_internal
from ugro.core.node import Gpu
from ugro.core.support.quantity import format_cost, format_duration, format_energy

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
