"""The values of a trial's metric, over all its attempts: as if it had never been interrupted. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ugro.core.sweep import Point
from ugro.policy.sweep.spec import Metric

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
