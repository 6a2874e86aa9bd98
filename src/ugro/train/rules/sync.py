"""Decides how often ranks synchronise (every step, or rounds of local SGD), and how gradients are compressed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypedDict

from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_duration, format_size
from ugro.train.rules.shares import Bounds, Cost, Mode, in_proportion, split

# --- compression ------------------------------------------------------------------------------------------------------
# Which compression of gradients pays: the ladder from none over half precision to low rank. Pure.
#
# The least that is lost for a speed near the best: half precision costs next to nothing, low rank (PowerSGD) changes
# the gradient of each step and makes up for it in later ones.


_WORTH_IT = 0.1  # of a step that the exchange takes
_NEARLY_AS_FAST = 1.25
_LEAST_PART = 0.1  # of an exchange that low rank still takes: it computes, and exchanges twice


class Method(StrEnum):
    NONE = "none"
    FP16 = "fp16"
    POWERSGD = "powersgd"


AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a step without compression."""

    ranks: int
    gradient_bytes: int
    low_rank_bytes: int  # that PowerSGD would send instead
    own_s: float  # of the slowest rank
    exchange_s: float  # that it waits for the exchange


@dataclass(frozen=True, slots=True)
class Choice:
    method: Method
    reason: str
    step_s: float  # predicted


def wished(name: str) -> str:
    if name not in (*Method, AUTO):
        raise UsageError(f"unknown compression {name!r}", hint=f"one of {', '.join((*Method, AUTO))}")
    return name


def choose(measured: Measured) -> Choice:
    whole_s = measured.own_s + measured.exchange_s
    share = measured.exchange_s / max(1e-12, whole_s)
    about = f"exchanging {format_size(measured.gradient_bytes)} takes {100 * share:.0f} % of a step"
    if share < _WORTH_IT:
        return Choice(Method.NONE, f"{about}: not worth compressing", whole_s)
    half_s = measured.own_s + measured.exchange_s / 2
    part = max(_LEAST_PART, measured.low_rank_bytes / max(1, measured.gradient_bytes))
    low_s = measured.own_s + measured.exchange_s * part
    about += f" ({format_size(_rate(measured))}/s)"
    if half_s <= _NEARLY_AS_FAST * low_s:
        return Choice(Method.FP16, f"{about}; in half precision a step should take {format_duration(half_s)}", half_s)
    sent = format_size(measured.low_rank_bytes)
    return Choice(Method.POWERSGD, f"{about}; as {sent} of low rank it should take {format_duration(low_s)}", low_s)


def _rate(measured: Measured) -> float:
    """What a ring sends, over the time that was waited for it."""
    return 2 * (measured.ranks - 1) / measured.ranks * measured.gradient_bytes / max(1e-12, measured.exchange_s)


# --- rounds -----------------------------------------------------------------------------------------------------------
# How many samples each rank takes in the next round, such that all need the same time. Pure, the same on all ranks.
#
# A round takes samples from the front of the epoch's order. The first rounds are short, since nothing is known of the
# ranks and models differ most at the beginning; each may be four times as long as the one before. An epoch is divided
# into equal rounds, and its last one ends for all ranks at the same time.


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


# --- staleness --------------------------------------------------------------------------------------------------------
# What a rank's update of the model counts, when some ranks are late. Pure: every rank gets the same result.
#
# A rank is late by as many rounds as were concluded without it since it got its samples. A late update was computed
# from an older model: in the average, each of its samples counts 1 / (1 + delay) of one that is in time. If nobody is
# in time, the model moves by that part of the average only. An update that is later than allowed is rejected, and so is
# one with numbers that are not finite.


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


# --- sync -------------------------------------------------------------------------------------------------------------


_ROUND_S = 20.0
_MOST_ROUND_S = 3600.0
_MOST_STALENESS = 64


class SyncMode(StrEnum):
    STEP = "step"  # gradients are exchanged in every step
    LOCAL = "local"  # models are averaged after each round


class Outer(StrEnum):
    """What becomes of the average of a round's changes."""

    AVERAGE = "average"  # it is taken as it is
    NESTEROV = "nesterov"  # a step of SGD with Nesterov momentum (DiLoCo)


@dataclass(frozen=True, slots=True)
class Sync:
    mode: SyncMode = SyncMode.STEP
    round_s: float = _ROUND_S
    max_staleness: int = 0  # rounds that a rank may be late; 0: all wait for each other
    outer: Outer = Outer.AVERAGE

    def __post_init__(self) -> None:
        if not (math.isfinite(self.round_s) and 0 < self.round_s <= _MOST_ROUND_S):
            raise UsageError(
                f"a round cannot take {self.round_s} seconds", hint=f"up to {_MOST_ROUND_S:.0f}, such as 20"
            )
        if not 0 <= self.max_staleness <= _MOST_STALENESS:
            raise UsageError(
                f"max_staleness cannot be {self.max_staleness}", hint=f"a whole number from 0 to {_MOST_STALENESS}"
            )

    @property
    def is_local(self) -> bool:
        return self.mode is SyncMode.LOCAL


class SyncOptions(TypedDict, total=False):
    """Keywords of ``ugro.train.init``; None is as if not given."""

    sync: str | None  # step or local
    round_s: float | None
    max_staleness: int | None
    outer: str | None  # average or nesterov
    nan: str | None  # stop, skip or ignore: of losses and gradients that are not finite


def chosen(sync: Sync, options: SyncOptions) -> Sync:
    """What a script says overrides its surroundings."""
    if (mode := options.get("sync")) is not None:
        sync = replace(sync, mode=sync_mode(mode))
    if (round_s := options.get("round_s")) is not None:
        sync = replace(sync, round_s=float(round_s))
    if (staleness := options.get("max_staleness")) is not None:
        sync = replace(sync, max_staleness=int(staleness))
    kind = options.get("outer")
    return sync if kind is None else replace(sync, outer=outer(kind))


def sync_mode(name: str) -> SyncMode:
    try:
        return SyncMode(name)
    except ValueError:
        raise UsageError(f"unknown sync mode {name!r}", hint=f"one of {', '.join(SyncMode)}") from None


def outer(name: str) -> Outer:
    try:
        return Outer(name)
    except ValueError:
        raise UsageError(f"unknown outer optimizer {name!r}", hint=f"one of {', '.join(Outer)}") from None
