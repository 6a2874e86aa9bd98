"""Splits a batch over unequal ranks so that the last rank finishes as early as possible.

Exact for every cost that grows with the number of samples. Every rank computes it from the same numbers and must get
the same result, so it only uses comparisons and + - × ÷, which all machines round alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from statistics import median

from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.quantities import in_words

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


# --- advice -----------------------------------------------------------------------------------------------------------
# Whether every rank is worth having: how long a step would take without some of them.
#
# A rank costs the time that others wait for it, and one more partner in every exchange of gradients.


_WORTH_SAYING = 0.03
_MAX_RANKS_TO_TRY_ALL = 10
_LEAST_S = 1e-9  # of a step: what is read may say that it takes no time


@dataclass(frozen=True, slots=True)
class Alternative:
    """A set of ranks, and how long a step with them should take."""

    ranks: tuple[int, ...]
    seconds: float
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    all_ranks: Alternative
    without: tuple[Alternative | None, ...]  # by the rank left out; None if the others cannot hold the batch
    best: Alternative
    words: str

    @property
    def gain(self) -> float:
        """How many times faster the best set is than all ranks."""
        return self.all_ranks.seconds / max(self.best.seconds, _LEAST_S)


def advise(costs: Sequence[Cost], total: int, communication_s: float, names: Sequence[str]) -> Advice:
    everyone = tuple(range(len(costs)))
    whole = _alternative(costs, total, communication_s, everyone)
    assert whole is not None
    without = tuple(
        _alternative(costs, total, communication_s, everyone[:rank] + everyone[rank + 1 :]) for rank in everyone
    )
    tried = [_alternative(costs, total, communication_s, ranks) for ranks in _subsets(costs, total)]
    best = min((one for one in (whole, *tried) if one is not None), key=lambda one: (one.seconds, -len(one.ranks)))
    if best.seconds > whole.seconds * (1 - _WORTH_SAYING):
        best = whole
    return Advice(whole, without, best, _words(whole, best, names))


def _alternative(
    costs: Sequence[Cost], total: int, communication_s: float, ranks: tuple[int, ...]
) -> Alternative | None:
    chosen = [costs[rank] for rank in ranks]
    if not chosen:
        return None
    try:
        shares = split(chosen, total, [Bounds()] * len(chosen))
    except Unsatisfiable:
        return None
    tail_s = communication_s * _exchanged(len(ranks)) / max(_exchanged(len(costs)), 1e-12)
    return Alternative(ranks, slowest_s(chosen, shares) + tail_s, shares)


def _exchanged(ranks: int) -> float:
    """How much of the gradients each rank sends in a ring."""
    return 2 * (ranks - 1) / ranks


def _subsets(costs: Sequence[Cost], total: int) -> list[tuple[int, ...]]:
    """All subsets; of many ranks only the fastest one, two, three…"""
    everyone = range(len(costs))
    if len(costs) <= _MAX_RANKS_TO_TRY_ALL:
        return [ranks for count in range(1, len(costs)) for ranks in combinations(everyone, count)]
    by_speed = sorted(everyone, key=lambda rank: (costs[rank].seconds(total), rank))
    return [tuple(sorted(by_speed[:count])) for count in range(1, len(costs))]


def _words(whole: Alternative, best: Alternative, names: Sequence[str]) -> str:
    if len(whole.ranks) == 1:
        return "one rank: nothing to balance"
    if best is whole:
        return "every rank is worth having"
    left_out = [names[rank] for rank in whole.ranks if rank not in best.ranks]
    faster = whole.seconds / max(best.seconds, _LEAST_S)
    return f"without {in_words(left_out)} this job would be {faster:.2f} times as fast"


# --- fit --------------------------------------------------------------------------------------------------------------
# Learns what a step costs a rank from how long its steps took: a fixed part, and a part for each sample.
#
# The two parts can be separated only when the share has changed. Until then, and after the rank has become slower or
# faster as a whole, the last known ratio is kept. A window that was disturbed, far from what the others say, has no
# say.


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


# --- mode -------------------------------------------------------------------------------------------------------------
# The balance modes: how a training's batches are divided among its ranks.


class Mode(StrEnum):
    OFF = "off"
    STATIC = "static"
    ADAPTIVE = "adaptive"
