"""Detects that a rank has become slower or faster: two steps in a row far from what the same share took before.

Steps are compared with earlier ones of the same share and not with predictions, which are least certain right after a
new plan. Only if the new share is nearly the same, earlier times are scaled to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

_BASELINE_STEPS = 3
_MAX_REMEMBERED = 16
_IN_A_ROW = 2
_NEARLY_THE_SAME = 0.1
_MIN_DEVIATION, _MAX_DEVIATION = 0.25, 0.60
_DEVIATIONS = 5.0  # median absolute ones: 3.4 standard deviations
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Shift:
    """From now on the rank takes ``factor`` times as long."""

    factor: float
    seconds: tuple[float, ...]


@dataclass(slots=True)
class RankWatch:
    samples: int = 0
    smoothed_s: float = 0.0  # for display only
    _usual: list[float] = field(default_factory=list)
    _strange: list[float] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return len(self._usual) >= _BASELINE_STEPS

    @property
    def is_undecided(self) -> bool:
        return bool(self._strange)

    def see(self, samples: int, seconds: float) -> Shift | None:
        self.smoothed_s += (seconds - self.smoothed_s) * (_SMOOTHING if self.smoothed_s else 1.0)
        if samples != self.samples:
            self._move_to(samples)
        if not self.is_ready or self._is_usual(seconds):
            self._usual = [*self._usual, seconds][-_MAX_REMEMBERED:]
            self._strange = []
            return None
        return self._unusual(seconds)

    def _move_to(self, samples: int) -> None:
        is_near = abs(samples - self.samples) <= _NEARLY_THE_SAME * self.samples
        scale = samples / self.samples if is_near else 0.0
        self._usual = [scale * one for one in self._usual] if is_near else []
        self._strange = [scale * one for one in self._strange] if is_near else []
        self.samples = samples

    def _unusual(self, seconds: float) -> Shift | None:
        usual = median(self._usual)
        # A slow step followed by a quick one is noise.
        same_side = [one for one in self._strange if (one > usual) == (seconds > usual)]
        self._strange = [*same_side, seconds]
        if len(self._strange) < _IN_A_ROW:
            return None
        shift = Shift(median(self._strange) / usual, tuple(self._strange))
        self._usual, self._strange = list(self._strange), []
        return shift

    def _is_usual(self, seconds: float) -> bool:
        usual = median(self._usual)
        spread = median([abs(one - usual) for one in self._usual]) / usual if usual > 0 else 0.0
        allowed = 1 + min(_MAX_DEVIATION, max(_MIN_DEVIATION, _DEVIATIONS * spread))
        return usual / allowed <= seconds <= usual * allowed
