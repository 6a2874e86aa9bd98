"""Learns what a step costs a rank from how long its steps took: a fixed part, and a part for each sample.

The two parts can be separated only when the share has changed. Until then, and after the rank has become slower or
faster as a whole, the last known ratio is kept. A window that was disturbed, far from what the others say, has no say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ugro.policy.balance.split import Cost

_FADING = 0.7  # the weight of a window relative to the next newer one
_MAX_WINDOWS = 12
_MIN_SPREAD = 0.1  # of the shares around their mean: with less, the slope is unknown
_MAX_RATIO = 0.8
_DISTURBED = 1.5  # a window that predicts so many times the others' time, or so much less
# From a median absolute deviation to the standard error of a median, for noise that is about normal.
_DEVIATION = 1.4826
_OF_A_MEDIAN = 1.2533


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps with the same share."""

    samples: int
    seconds: float  # their median
    spread: float  # their median absolute deviation, relative to the median
    steps: int
    micro_batches: int = 1

    @classmethod
    def of(cls, samples: int, seconds: Sequence[float], micro_batches: int = 1) -> Window:
        middle = median(seconds)
        deviation = median([abs(one - middle) for one in seconds])
        return cls(samples, middle, deviation / middle if middle > 0 else 0.0, len(seconds), micro_batches)


@dataclass(slots=True)
class RankFit:
    """One rank's windows, the newest last, and the cost learned from them."""

    fixed_ratio: float = 0.0  # the part of a step's time at the newest share that does not depend on the share
    optimizer_s: float = 0.0  # the part of the fixed time that micro-batches do not repeat
    windows: list[Window] = field(default_factory=list)

    def add(self, window: Window, optimizer_s: float) -> None:
        self.optimizer_s = optimizer_s
        if self.windows:
            variable = (1 - self.fixed_ratio) * window.samples / self.windows[-1].samples
            self.fixed_ratio /= self.fixed_ratio + variable
        self.windows = [*self.windows, window][-_MAX_WINDOWS:]
        self._learn_ratio()

    def restart(self, window: Window) -> None:
        """The rank has become slower or faster as a whole: throttling scales the fixed part like the rest."""
        self.windows = [window]

    @property
    def is_known(self) -> bool:
        return bool(self.windows)

    @property
    def error(self) -> float:
        """The relative standard error of the cost."""
        weighted = self._weighted()
        steps = math.fsum(weight for weight, _ in weighted)
        spread = math.fsum(weight * window.spread for weight, window in weighted) / steps
        return _DEVIATION * _OF_A_MEDIAN * spread / math.sqrt(steps)

    def cost(self, cap: int | None = None) -> Cost:
        samples, seconds = self._anchor()
        fixed = self.fixed_ratio * seconds
        per_step = min(self.optimizer_s, fixed)
        return Cost(per_step, fixed - per_step, (seconds - fixed) / samples, cap)

    def _anchor(self) -> tuple[float, float]:
        """A point on the line: the newest share, and the weighted mean of the times that the windows predict for it."""
        share = self.windows[-1].samples
        found = [(self._at(share, window), weight) for weight, window in self._weighted()]
        middle = _weighted_median(found)
        near = [(time, weight) for time, weight in found if middle / _DISTURBED <= time <= middle * _DISTURBED]
        found = near or found  # two sides of equal weight, and nothing in the middle
        whole = math.fsum(weight for _, weight in found)
        return share, math.fsum(time * weight for time, weight in found) / whole

    def _at(self, share: int, window: Window) -> float:
        """The time at ``share`` that a window predicts; ``fixed_ratio`` is that of the newest share."""
        per_sample = (1 - self.fixed_ratio) / share
        return self._as_one_micro(window) / (self.fixed_ratio + per_sample * window.samples)

    def _learn_ratio(self) -> None:
        weighted = self._weighted()
        whole = math.fsum(weight for weight, _ in weighted)
        mean_n = math.fsum(weight * window.samples for weight, window in weighted) / whole
        spread = max(abs(window.samples - mean_n) for _, window in weighted)
        if spread < _MIN_SPREAD * mean_n:
            return
        points = [(weight, window.samples, self._as_one_micro(window)) for weight, window in weighted]
        slope = _slope(points)
        share = self.windows[-1].samples
        seconds = _weighted_median([(time + slope * (share - samples), weight) for weight, samples, time in points])
        ratio = 1 - slope * share / seconds if seconds > 0 else 0.0
        self.fixed_ratio = min(_MAX_RATIO, max(0.0, ratio))

    def _as_one_micro(self, window: Window) -> float:
        """The window's time as if the device could hold the share in one micro-batch."""
        more = window.micro_batches - 1
        return (window.seconds + more * self.optimizer_s) / (1 + more * self.fixed_ratio)

    def _weighted(self) -> list[tuple[float, Window]]:
        """Newest first. By multiplication, because powers are not rounded alike on all machines."""
        fade, weighted = 1.0, []
        for window in reversed(self.windows):
            weighted.append((fade * window.steps, window))
            fade *= _FADING
        return weighted


def _slope(points: Sequence[tuple[float, int, float]]) -> float:
    """The weighted median of the slopes between all pairs: one disturbed window does not turn the line."""
    slopes = []
    for index, (weight, samples, seconds) in enumerate(points):
        for other_weight, other_samples, other_seconds in points[:index]:
            if (offset := samples - other_samples) != 0:
                slopes.append(((seconds - other_seconds) / offset, weight * other_weight * offset * offset))
    return _weighted_median(slopes)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of values with their weights; halfway between two if the weights are equal on both sides."""
    ordered = sorted(values)
    half = 0.5 * math.fsum(weight for _, weight in ordered)
    below = 0.0
    for index, (value, weight) in enumerate(ordered):
        below += weight
        if below == half and index + 1 < len(ordered):
            return 0.5 * (value + ordered[index + 1][0])
        if below > half:
            return value
    return ordered[-1][0]
