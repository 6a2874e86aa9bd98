"""Whether every rank is worth having: how long a step would take without some of them.

A rank costs the time that others wait for it, and one more partner in every exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ugro.core.errors import Unsatisfiable
from ugro.policy.balance.split import Bounds, Cost, slowest_s, split
from ugro.policy.wording import in_words

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
