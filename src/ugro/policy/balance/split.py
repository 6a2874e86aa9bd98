"""Splits a batch over unequal ranks so that the last rank finishes as early as possible.

Exact for every cost that grows with the number of samples. Every rank computes it from the same numbers and must get
the same result, so it only uses comparisons and + - × ÷, which all machines round alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ugro.core.errors import Unsatisfiable

_MAX_HALVINGS = 60
_MOST_PIECES = 2000  # that are handed out one by one; of more, each is larger


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds that a step costs a rank: once, for each micro-batch, and for each sample."""

    per_step_s: float = 0.0
    per_micro_s: float = 0.0
    per_sample_s: float = 1.0
    cap: int | None = None  # how many samples it can hold at once

    def seconds(self, samples: float) -> float:
        return self.per_step_s + self.micro_batches(samples) * self.per_micro_s + samples * self.per_sample_s

    def micro_batches(self, samples: float) -> int:
        return 1 if self.cap is None else max(1, int(-(-samples // self.cap)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many samples a rank may get."""

    least: int = 1
    most: int | None = None

    def within(self, cap: int | None) -> Bounds:
        """Also no more than the cap."""
        if cap is None:
            return self
        return Bounds(min(self.least, cap), cap if self.most is None else min(self.most, cap))


def split(costs: Sequence[Cost], total: int, bounds: Sequence[Bounds], granule: int = 1) -> tuple[int, ...]:
    """Returns shares that add up to ``total``: multiples of ``granule`` as far as total and bounds allow."""
    least, most = _limits(total, bounds)
    # All samples done by this time belong to the result; the rest goes piece by piece to the rank that finishes first.
    shares = _done_by(_level(costs, total, least, most, granule), costs, least, most, granule)
    remaining = total - sum(shares)
    # Costs of nothing, or too different for a float, leave nearly all of it: 10¹⁸ samples are too many to hand out.
    granule *= max(1, remaining // (granule * max(_MOST_PIECES, len(costs))))
    queue = [(_after_next(costs[rank], shares[rank], granule, most[rank]), rank) for rank in range(len(costs))]
    queue = [entry for entry in queue if shares[entry[1]] < most[entry[1]]]
    heapq.heapify(queue)
    while remaining > 0:
        _, rank = heapq.heappop(queue)
        piece = min(_piece(shares[rank], granule, most[rank]), remaining)
        shares[rank] += piece
        remaining -= piece
        if shares[rank] < most[rank]:
            heapq.heappush(queue, (_after_next(costs[rank], shares[rank], granule, most[rank]), rank))
    return tuple(shares)


_LEAST_GRANULES = 4  # in an equal share; with fewer, shares would be too far from what ranks can do
_LARGEST_GRANULE = 8


def granule_for_gpus(total: int, ranks: int) -> int:
    """Returns 8, or for a smaller batch 4, 2 or 1.

    A GPU computes multiples of 8 at full speed, and what is compiled for a size is used again if shares have few sizes.
    """
    granule = _LARGEST_GRANULE
    while granule > 1 and total < granule * _LEAST_GRANULES * ranks:
        granule //= 2
    return granule


def uniform(total: int, ranks: int) -> tuple[int, ...]:
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def in_proportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """By the largest-remainder method; a rank may get nothing."""
    whole = sum(weights)
    if whole <= 0:
        return uniform(total, len(weights))
    exact = [total * weight / whole for weight in weights]
    shares = [min(total, int(part)) for part in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - exact[rank], rank))
    missing = total - sum(shares)
    for rank in by_remainder[:missing]:
        shares[rank] += 1
    return tuple(shares)


def slowest_s(costs: Sequence[Cost], shares: Sequence[float]) -> float:
    return max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True))


def _limits(total: int, bounds: Sequence[Bounds]) -> tuple[list[int], list[int]]:
    most = [total if bound.most is None else min(total, bound.most) for bound in bounds]
    least = [min(bound.least, high) for bound, high in zip(bounds, most, strict=True)]
    if sum(least) > total:
        raise Unsatisfiable(
            f"a global batch of {total} is too small: the {len(bounds)} ranks need at least {sum(least)} samples",
            hint="raise global_batch, or use fewer ranks",
        )
    if sum(most) < total:
        raise Unsatisfiable(
            f"a global batch of {total} does not fit: the {len(bounds)} ranks can hold {sum(most)} samples",
            hint="lower global_batch, or let ranks accumulate: run.step(loss_fn, batch)",
        )
    return least, most


def _level(costs: Sequence[Cost], total: int, least: list[int], most: list[int], granule: int) -> float:
    """A time within which nearly all of ``total``, and not more, can be done."""
    low, high = 0.0, slowest_s(costs, most)
    for _ in range(_MAX_HALVINGS):
        middle = (low + high) / 2
        done = sum(_done_by(middle, costs, least, most, granule))
        if done > total:
            high = middle
        else:
            low = middle
            if done + granule * len(costs) >= total:
                break
    # If even the least shares exceed the total, any level will do.
    return low


def _done_by(limit_s: float, costs: Sequence[Cost], least: list[int], most: list[int], granule: int) -> list[int]:
    return [
        _samples_within(limit_s, cost, low, high, granule) for cost, low, high in zip(costs, least, most, strict=True)
    ]


def _samples_within(limit_s: float, cost: Cost, least: int, most: int, granule: int) -> int:
    """The largest number of whole granules done within the limit, and at least ``least``."""
    if cost.seconds(most) <= limit_s:
        return most
    low, high = least, most  # `low` is always allowed; `high` takes too long
    while high - low > 1:
        middle = (low + high) // 2
        if cost.seconds(middle) <= limit_s:
            low = middle
        else:
            high = middle
    return max(least, low - low % granule)


def _piece(share: int, granule: int, most: int) -> int:
    """The samples up to the next multiple of the granule."""
    return min(granule - share % granule, most - share)


def _after_next(cost: Cost, share: int, granule: int, most: int) -> float:
    return cost.seconds(share + _piece(share, granule, most))
