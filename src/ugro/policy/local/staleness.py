"""What a rank's update of the model counts, when some ranks are late. Pure: every rank gets the same result.

A rank is late by as many rounds as were concluded without it since it got its samples. A late update was computed from
an older model: it counts 1 / (1 + delay) of what it would have counted. One that is later than allowed is rejected.
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


@dataclass(frozen=True, slots=True)
class Verdict:
    weights: tuple[float, ...]  # of each rank's change in the average; they add up to 1, or all are 0
    late: tuple[int, ...]  # ranks whose updates count less
    rejected: tuple[int, ...]  # ranks whose updates do not count


def judge(updates: Sequence[Update | None], max_staleness: int) -> Verdict:
    """None: the rank is not there; it computes."""
    masses = [_counted(update, max_staleness) for update in updates]
    whole = sum(masses)
    weights = tuple(mass / whole if whole > 0 else 0.0 for mass in masses)
    there = [(rank, update.delay) for rank, update in enumerate(updates) if update is not None and update.mass > 0]
    late = tuple(rank for rank, delay in there if 0 < delay <= max_staleness)
    return Verdict(weights, late, tuple(rank for rank, delay in there if delay > max_staleness))


def patience_s(planned_s: float) -> float:
    """How long ranks that are done wait for the others before they go on without them, or end the others' round."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * planned_s)


def _counted(update: Update | None, max_staleness: int) -> float:
    if update is None or update.delay > max_staleness:
        return 0.0
    return update.mass / (1 + update.delay)
