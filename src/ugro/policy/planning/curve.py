"""What a step costs a rank at any share, from what a trial measured at a few.

Between two measured shares it is a line, so a measured share keeps its measured time. Below the smallest one the line
goes on as far as a fixed part of zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ugro.core.planning import RankTrial
from ugro.policy.balance.split import Cost

_LEAST_SLOPE = 0.05  # of the mean time per sample: a step with more samples never takes less
_ONE_POINT_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Curve(Cost):
    points: tuple[tuple[int, float], ...] = ()  # samples and seconds, the smallest first
    scale: float = 1.0  # how many times as long it takes in company

    @classmethod
    def of(cls, rank: RankTrial, scale: float = 1.0) -> Curve:
        points: list[tuple[int, float]] = []
        for point in rank.points:
            seconds = point.seconds
            if points:  # noise must not make more samples cheaper
                before, least = points[-1]
                seconds = max(seconds, least + _LEAST_SLOPE * least / before * (point.samples - before))
            points.append((point.samples, seconds))
        samples, seconds = points[-1]
        fixed_s = min(rank.optimizer_s, 0.8 * points[0][1])
        return cls(fixed_s, 0.0, seconds / samples, rank.cap, tuple(points), scale)

    def seconds(self, samples: float) -> float:
        micro_batches = self.micro_batches(samples)
        if micro_batches == 1:
            return self.scale * self._at(samples)
        part_s = self._at(samples / micro_batches) - self.per_step_s
        return self.scale * (self.per_step_s + micro_batches * part_s)

    def _at(self, samples: float) -> float:
        first, second = self._around(samples)
        if first == second:
            fixed_s, (at, seconds) = self.per_step_s, first
            return fixed_s + (seconds - fixed_s) * samples / at
        slope = (second[1] - first[1]) / (second[0] - first[0])
        if samples >= self.points[0][0]:
            return first[1] + slope * (samples - first[0])
        fixed_s = max(self.per_step_s, first[1] - slope * first[0])
        return fixed_s + (first[1] - fixed_s) * samples / first[0]

    def _around(self, samples: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """The two points of the line on which it is."""
        if len(self.points) == 1:
            return self.points[0], self.points[0]
        upper = next((place for place, point in enumerate(self.points) if point[0] >= samples), len(self.points) - 1)
        upper = max(1, upper)
        return self.points[upper - 1], self.points[upper]

    @property
    def fixed_s(self) -> float:
        """The part of a step that does not depend on the share."""
        return self._at(0)


def error_of(rank: RankTrial) -> float:
    """The relative standard error of what the curve says."""
    found = max(point.spread / math.sqrt(point.steps) for point in rank.points)
    return math.hypot(found, _ONE_POINT_ERROR) if len(rank.points) == 1 else found


def spread_of(rank: RankTrial) -> float:
    """How much single steps differ, relative to their mean."""
    return max(point.spread for point in rank.points)
