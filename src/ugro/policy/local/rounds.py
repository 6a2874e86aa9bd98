"""How many samples each rank takes in the next round, such that all need the same time. Pure, the same on all ranks.

A round takes samples from the front of the epoch's order. The first rounds are short, since nothing is known of the
ranks and models differ most at the beginning; each may be four times as long as the one before. An epoch is divided
into equal rounds, and its last one ends for all ranks at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.policy.balance.mode import Mode
from ugro.policy.balance.split import Bounds, Cost, in_proportion, split

_FIRST_STEPS = 2
_GROWTH = 4.0
_LAST = 1.5  # so much of a round is left at most to one last round
_WHOLE_BATCHES = 8  # with so many steps, a round has whole batches only; with fewer, rounding would cost too much
_SMOOTHING = 0.5
_SHIFT = 1.25  # a rank that is so many times slower or faster than before has changed


@dataclass(frozen=True, slots=True)
class Wish:
    batch: int  # samples of a rank's own step
    round_s: float
    least: int = 1  # samples that a step needs
    mode: Mode = Mode.ADAPTIVE
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    shares: tuple[int, ...]  # samples of each rank
    seconds: float | None  # that it should take; None: not known yet
    reason: str

    @property
    def total(self) -> int:
        return sum(self.shares)


@dataclass(slots=True)
class Rounds:
    wish: Wish
    ranks: int
    pace: list[float | None] = field(init=False)  # seconds per sample
    parts: list[float] = field(init=False)  # of an equal share, the most that each rank is to take
    _planned_s: float | None = field(init=False, default=None)  # or what the first round took
    _has_grown: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.pace = [None] * self.ranks
        self.parts = [1.0] * self.ranks

    # --- what is known ------------------------------------------------------------------------------------------

    def observe(self, rank: int, samples: int, seconds: float, part: float = 1.0) -> None:
        """What a rank did in a round."""
        self.parts[rank] = part
        if samples <= 0 or seconds <= 0:
            return
        new, old = seconds / samples, self.pace[rank]
        is_shift = old is None or max(new, old) > _SHIFT * min(new, old)
        self.pace[rank] = new if old is None or is_shift else old + _SMOOTHING * (new - old)
        if not self._has_grown:
            self._planned_s = max(self._planned_s or 0.0, seconds)

    def state(self) -> dict[str, Any]:
        return {"pace": list(self.pace), "planned_s": self._planned_s, "batch": self.wish.batch}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of another number of ranks nothing is known."""
        if len(state["pace"]) == self.ranks:
            self.pace, self._planned_s = list(state["pace"]), state["planned_s"]
            self._has_grown = self._planned_s is not None

    # --- the next round -----------------------------------------------------------------------------------------

    def plan(self, left: int, free: Sequence[bool]) -> RoundPlan:
        """``left``: samples of the epoch that no rank has; ``free``: the ranks that have none to compute."""
        ranks = [rank for rank in range(self.ranks) if free[rank]]
        if not ranks or left <= 0:
            return RoundPlan((0,) * self.ranks, 0.0, "no samples are left" if ranks else "all ranks are busy")
        paces = self._paces(ranks)
        if paces is None:
            return self._first(left, ranks)
        target_s = self.wish.round_s if self._planned_s is None else min(self.wish.round_s, _GROWTH * self._planned_s)
        full = [self._within(target_s, pace) for pace in paces]
        if left < _LAST * sum(full):
            return self._last(left, ranks, paces)
        target_s *= left / (round(left / sum(full)) * sum(full))  # equal rounds
        self._planned_s, self._has_grown = target_s, True
        shares = self._limited([self._within(target_s, pace) for pace in paces], ranks)
        return RoundPlan(self._spread(shares, ranks), target_s, f"rounds of {target_s:.3g} s")

    def _first(self, left: int, ranks: Sequence[int]) -> RoundPlan:
        is_known = len(self.wish.speeds) == self.ranks and self.wish.mode is not Mode.OFF
        speeds = self.wish.speeds if is_known else (1.0,) * self.ranks
        most, fastest = _FIRST_STEPS * self.wish.batch, max(speeds[rank] for rank in ranks)
        wanted = [max(self.wish.least, math.ceil(most * speeds[rank] / fastest)) for rank in ranks]
        if left < _LAST * sum(wanted):
            return self._last(left, ranks, [1 / one for one in wanted])
        return RoundPlan(self._spread(wanted, ranks), None, f"{_FIRST_STEPS} steps to measure the ranks")

    def _last(self, left: int, ranks: Sequence[int], paces: Sequence[float]) -> RoundPlan:
        """All that is left, on as many ranks as can have enough of it: the fastest ones."""
        by_pace = sorted(range(len(ranks)), key=lambda place: (paces[place], place))
        count = max(1, min(len(ranks), left // max(1, self.wish.least)))
        chosen = sorted(by_pace[:count])
        costs = [Cost(per_sample_s=paces[place]) for place in chosen]
        shares = split(costs, left, [Bounds(min(self.wish.least, left))] * count)
        chosen_ranks = [ranks[place] for place in chosen]
        known_s = max(share * paces[place] for share, place in zip(shares, chosen, strict=True))
        seconds = known_s if any(pace is not None for pace in self.pace) else None
        return RoundPlan(self._spread(self._limited(list(shares), chosen_ranks), chosen_ranks), seconds, "the rest")

    def _paces(self, ranks: Sequence[int]) -> list[float] | None:
        """Seconds per sample that the shares follow; None if no rank was measured."""
        known = [pace for pace in self.pace if pace is not None]
        if not known:
            return None
        slowest = max(known)
        own = [self.pace[rank] or slowest for rank in ranks]
        if self.wish.mode is Mode.OFF:
            return [max(own)] * len(ranks)
        speeds = self.wish.speeds
        if self.wish.mode is Mode.STATIC and len(speeds) == self.ranks:
            scale = max(pace * speeds[rank] for pace, rank in zip(own, ranks, strict=True))
            return [scale / speeds[rank] for rank in ranks]
        return own if self.wish.mode is Mode.ADAPTIVE else [max(own)] * len(ranks)

    def _within(self, seconds: float, pace: float) -> int:
        samples, batch = seconds / pace, self.wish.batch
        steps = samples / batch
        whole = batch * int(steps + 0.5) if steps >= _WHOLE_BATCHES else int(samples)
        return max(self.wish.least, whole)

    def _limited(self, shares: list[int], ranks: Sequence[int]) -> list[int]:
        """On machines whose owners are there, ranks take less; the others take the rest."""
        total = sum(shares)
        most = [max(self.wish.least, int(self.parts[rank] * total / len(ranks))) for rank in ranks]
        limited = [
            min(share, limit) if self.parts[rank] < 1 else share
            for share, limit, rank in zip(shares, most, ranks, strict=True)
        ]
        over = total - sum(limited)
        able = [share if self.parts[rank] >= 1 else 0 for share, rank in zip(shares, ranks, strict=True)]
        if over <= 0 or not any(able):
            return shares if not any(able) else limited
        return [share + more for share, more in zip(limited, in_proportion(over, able), strict=True)]

    def _spread(self, shares: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
        given = dict(zip(ranks, shares, strict=True))
        return tuple(given.get(rank, 0) for rank in range(self.ranks))


# --- positions in the order of an epoch ---------------------------------------------------------------------------

Ranges = tuple[tuple[int, int], ...]  # of positions, from and up to


def size(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def take(ranges: Ranges, samples: int) -> tuple[Ranges, Ranges]:
    """The first so many of them, and the rest."""
    taken: list[tuple[int, int]] = []
    for place, (begin, end) in enumerate(ranges):
        if samples <= 0:
            return tuple(taken), ranges[place:]
        cut = min(end, begin + samples)
        taken.append((begin, cut))
        samples -= cut - begin
        if cut < end:
            return tuple(taken), ((cut, end), *ranges[place + 1 :])
    return tuple(taken), ()


def merged(ranges: Ranges) -> Ranges:
    """In order, with neighbours as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(one for one in ranges if one[0] < one[1]):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def batches(samples: int, batch: int) -> list[int]:
    """The steps of a share: whole batches if it has whole ones, else some as equal as possible."""
    count = -(-samples // batch)
    if count == 0:
        return []
    return [samples // count + (number < samples % count) for number in range(count)]
