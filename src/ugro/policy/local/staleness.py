"""What a rank's update of the model counts, when some ranks are late. Pure: every rank gets the same result.

A rank is late by as many rounds as were concluded without it since it got its samples. A late update was computed from
an older model: in the average, each of its samples counts 1 / (1 + delay) of one that is in time. If nobody is in time,
the model moves by that part of the average only. An update that is later than allowed is rejected,
and so is one with numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PATIENCE = 0.5  # of a round's planned time
_LEAST_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Update:
    """What a rank brings to the end of a round."""

    mass: float  # its samples, or the sum of their weights
    delay: int = 0  # rounds that it is late
    is_finite: bool = True  # else it would spoil the average, whatever its weight


@dataclass(frozen=True, slots=True)
class Verdict:
    weights: tuple[float, ...]  # of each rank's change; they add up to 1 if one is in time, to less if all are late
    late: tuple[int, ...]  # ranks whose updates count less
    rejected: tuple[int, ...]  # ranks whose updates do not count


def judge(updates: Sequence[Update | None], max_staleness: int) -> Verdict:
    """None: the rank is not there; it computes."""
    masses = [_counted(update, max_staleness) for update in updates]
    whole = sum(masses)
    brought = [(rank, update) for rank, update in enumerate(updates) if update is not None]
    there = [(rank, update.delay) for rank, update in brought if update.mass > 0 and update.is_finite]
    least_delay = min((delay for _, delay in there if delay <= max_staleness), default=0)
    weights = tuple(mass / whole / (1 + least_delay) if whole > 0 else 0.0 for mass in masses)
    late = tuple(rank for rank, delay in there if 0 < delay <= max_staleness)
    rejected = [rank for rank, one in brought if not one.is_finite or (one.mass > 0 and one.delay > max_staleness)]
    return Verdict(weights, late, tuple(rejected))


def patience_s(planned_s: float) -> float:
    """How long ranks that are done wait for the others before they go on without them, or end the others' round."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * planned_s)


def _counted(update: Update | None, max_staleness: int) -> float:
    if update is None or update.delay > max_staleness or not update.is_finite:
        return 0.0
    return update.mass / (1 + update.delay)
