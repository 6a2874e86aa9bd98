"""Learns what a step costs a rank from how long its steps took: a fixed part, and a part for each sample.

The two parts can be separated only when the share has changed. Until then, and after the rank has become slower or
faster as a whole, the last known ratio is kept.
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
        """A point on the line: the newest share, and the weighted mean of the times that all windows predict for it."""
        share = self.windows[-1].samples
        weighted = self._weighted()
        whole = math.fsum(weight for weight, _ in weighted)
        return share, math.fsum(weight * self._at(share, window) for weight, window in weighted) / whole

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
        points = [(weight, window.samples - mean_n, self._as_one_micro(window)) for weight, window in weighted]
        mean_t = math.fsum(weight * seconds for weight, _, seconds in points) / whole
        slope = math.fsum(weight * offset * (seconds - mean_t) for weight, offset, seconds in points)
        slope /= math.fsum(weight * offset * offset for weight, offset, _ in points)
        share = self.windows[-1].samples
        seconds = mean_t + slope * (share - mean_n)
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
