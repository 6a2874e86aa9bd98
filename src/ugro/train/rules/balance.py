"""Notices stragglers (``RankWatch``), and divides the global batch among unequal ranks: observations in, a plan out.

Every rank has a planner, feeds it the same gathered numbers and gets the same plans, without any coordination. A plan
changes only if the gain exceeds the noise: after a window of steps, or at once when a rank has become slower or faster.
One plan at most doubles or halves a share, because the few steps behind it may have been disturbed; after a large move
the next plan comes sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ugro.kernel.support.errors import Unsatisfiable, UsageError
from ugro.train.rules.shares import Bounds, Cost, Mode, RankFit, Window, in_proportion, slowest_s, split, uniform

# --- watch ------------------------------------------------------------------------------------------------------------
# Detects that a rank has become slower or faster: two steps in a row far from what the same share took before.
#
# Steps are compared with earlier ones of the same share and not with predictions, which are least certain right after a
# new plan. Only if the new share is nearly the same, earlier times are scaled to it.


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


# --- planner ----------------------------------------------------------------------------------------------------------


# The first step allocates, compiles and connects; in the second one DDP rebuilds its buckets, and all ranks wait.
_WARM_UP_STEPS = 2
_FIRST_WINDOW, _NEXT_WINDOW, _MAX_WINDOW = 2, 4, 32
_SOON_WINDOW = 3  # after a large move: the median of three steps ignores a slow first one
_DISAGREE = 2.0  # two steps of a rank that differ so much: a third one decides which was disturbed
_MAX_MOVE = 2  # how many times as large, or as small, one plan makes a share
_LARGE_MOVE = 1.5
_MIN_GAIN = 0.02
_MIN_GAIN_OF_A_SHIFT = 0.1  # based on two steps only
# How many standard errors a gain must exceed. After many steps a move that proves useless costs less than one not made.
_COMPARED, _COMPARED_LONG = 2.0, 1.0
_MAX_ERROR = 0.15  # a noise estimate from two steps is mostly noise itself
_GAIN_OF_ACCUMULATING = 1.05  # smaller micro-batches are less efficient than they look
_REMEMBERED_TAILS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """What is divided, and among which ranks."""

    total: int
    names: tuple[str, ...]  # of the ranks, for messages
    least: int = 1
    granule: int = 1

    @property
    def ranks(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of all ranks."""

    shares: tuple[int, ...]
    seconds: tuple[float, ...]  # each rank's own time, without waiting for others
    optimizer_s: tuple[float, ...] = ()
    communication_s: float = 0.0
    micro_batches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    reason: str
    predicted_s: float | None = None  # for a step; None before anything is measured

    def share_of(self, total: int) -> tuple[int, ...]:
        """The shares of a batch that may be smaller, such as the last one of an epoch."""
        return self.shares if total == sum(self.shares) else in_proportion(total, self.shares)


@dataclass(slots=True)
class Balancer:
    batch: Batch
    mode: Mode = Mode.ADAPTIVE
    speeds: tuple[float, ...] = ()  # estimated from the hardware; used before anything is measured
    can_accumulate: bool = False
    plan: Plan = field(init=False)
    caps: list[int | None] = field(init=False)
    parts: list[float] = field(init=False)  # of an equal share, the most that each rank is to take; 1: no limit
    estimated: list[bool] = field(init=False)  # which of the caps are, and not found out
    _fits: list[RankFit] = field(init=False)
    _watches: list[RankWatch] = field(init=False)
    _window: list[Observation] = field(init=False, default_factory=list)
    _window_steps: int = field(init=False, default=_FIRST_WINDOW)
    _warm_up: int = field(init=False, default=_WARM_UP_STEPS)
    _tails: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        ranks = self.batch.ranks
        self.caps = [None] * ranks
        self.estimated = [False] * ranks
        self.parts = [1.0] * ranks
        self._fits = [RankFit() for _ in range(ranks)]
        self._watches = [RankWatch() for _ in range(ranks)]
        self.plan = self._first_plan()

    # --- what happens -------------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> Plan | None:
        """Returns a new plan if this step gives reason for one."""
        if sum(observation.shares) != self.batch.total:  # the last batch of an epoch
            return None
        if self._warm_up > 0:
            self._warm_up -= 1
            return None
        self._tails = [*self._tails, observation.communication_s][-_REMEMBERED_TAILS:]
        shifts = self._watch(observation)
        # Steps of an earlier plan may still follow: loaders prepare some ahead.
        if observation.shares == self.plan.shares:
            self._window.append(observation)
        if shifts:
            return self._follow_shifts(observation, shifts)
        # An unusual step is judged after the next one.
        if len(self._window) < self._window_steps or any(watch.is_undecided for watch in self._watches):
            return None
        return None if self._is_ambiguous() else self._close_window()

    def limit(
        self, caps: Sequence[int | None], parts: Sequence[float] = (), estimated: Sequence[bool] = ()
    ) -> Plan | None:
        """Sets what each rank can hold at once and is to take at most; in every mode, that is obeyed immediately."""
        self.estimated = list(estimated) or [False] * len(caps)
        if parts and list(parts) != self.parts:
            return self._take_parts(caps, parts)
        if list(caps) == self.caps:
            return None
        self.caps = list(caps)
        names = [
            f"{self.batch.names[rank]} {self._holds(rank)} {cap} samples"
            for rank, cap in enumerate(caps)
            if cap is not None and self.plan.shares[rank] > cap
        ]
        if not names:
            return None
        return self._adopt(self._best_shares(), "; ".join(names))

    def _holds(self, rank: int) -> str:
        return "has free memory for about" if self.estimated[rank] else "can hold"

    def _take_parts(self, caps: Sequence[int | None], parts: Sequence[float]) -> Plan | None:
        """On machines whose owners are there, ranks take little; when those are gone, what they can."""
        self.caps, self.parts = list(caps), list(parts)
        shares = self._best_shares()
        if shares == self.plan.shares:
            return None
        names = [name for name, part in zip(self.batch.names, parts, strict=True) if part < 1]
        reason = f"the owner uses {', '.join(names)}" if names else "no owner uses a machine any more"
        return self._adopt(shares, reason)

    def _most(self) -> list[int | None]:
        """What each rank is to take; no limit where nobody would be left to take the rest."""
        batch = self.batch
        equal = batch.total / batch.ranks
        most = [None if part >= 1 else max(batch.least, int(equal * part)) for part in self.parts]
        bounds = [Bounds(1, one) for one in most]
        if not self.can_accumulate:
            bounds = [bound.within(cap) for bound, cap in zip(bounds, self.caps, strict=True)]
        return most if self._have_room(bounds) else [None] * batch.ranks

    def _have_room(self, bounds: Sequence[Bounds]) -> bool:
        total = self.batch.total
        return sum(total if bound.most is None else bound.most for bound in bounds) >= total

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def is_informed(self) -> bool:
        return all(fit.is_known for fit in self._fits)

    @property
    def communication_s(self) -> float:
        return median(self._tails) if self._tails else 0.0

    @property
    def smoothed_s(self) -> tuple[float, ...]:
        return tuple(watch.smoothed_s for watch in self._watches)

    def costs(self) -> list[Cost]:
        if self.is_informed:
            return [fit.cost(cap) for fit, cap in zip(self._fits, self.caps, strict=True)]
        return self._costs_by_speed()

    def state(self) -> dict[str, Any]:
        """What the next attempt of the same ranks can resume from."""
        return {
            "names": list(self.batch.names),
            "total": self.batch.total,
            "shares": list(self.plan.shares),
            "caps": self._found_out(),
            "fits": [asdict(fit) for fit in self._fits],
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Returns False for the state of other ranks or another batch, which does not apply here."""
        if tuple(state["names"]) != self.batch.names or state["total"] != self.batch.total:
            return False
        self.caps = list(state["caps"])
        self._fits = [_fit(one) for one in state["fits"]]
        if self.mode is Mode.ADAPTIVE:
            self._adopt(tuple(state["shares"]), "restored from the checkpoint")
        return True

    def known(self) -> dict[str, Any]:
        """What was learnt of each rank, by its name: it holds for a group with other members, too."""
        ranks = zip(self.batch.names, self._found_out(), self._fits, strict=True)
        return {name: {"cap": cap, "fit": asdict(fit)} for name, cap, fit in ranks}

    def recall(self, known: Mapping[str, Any]) -> None:
        """Plans with what is known of these ranks, where all of them are known."""
        found = [known.get(name) for name in self.batch.names]
        self.caps = [one["cap"] if one else None for one in found]
        self._fits = [_fit(one["fit"]) if one else RankFit() for one in found]
        is_capped = any(cap is not None and cap < share for cap, share in zip(self.caps, self.plan.shares, strict=True))
        if is_capped or (self.mode is Mode.ADAPTIVE and self.is_informed):
            self._adopt(self._best_shares(), "the ranks have changed")

    def _found_out(self) -> list[int | None]:
        """The caps that hold for another attempt; others are estimated again, from what is free then."""
        return [None if guess else cap for cap, guess in zip(self.caps, self.estimated, strict=True)]

    # --- decisions ----------------------------------------------------------------------------------------------

    def _first_plan(self) -> Plan:
        batch = self.batch
        if self.speeds and (len(self.speeds) != batch.ranks or min(self.speeds) <= 0):
            raise UsageError(f"{len(self.speeds)} speeds for {batch.ranks} ranks: give one above 0 for each rank")
        if self.mode is Mode.OFF or not self.speeds:
            if batch.total < batch.least * batch.ranks:
                self._best_shares()  # raises an error that says what is wrong
            reason = "balancing is off" if self.mode is Mode.OFF else "the speeds of the ranks are not known yet"
            is_rough = self.mode is Mode.ADAPTIVE and batch.granule > 1
            shares = self._best_shares() if is_rough else uniform(batch.total, batch.ranks)
            return self._planned(shares, f"equal shares: {reason}")
        return self._planned(self._best_shares(), "in proportion to the speeds of the hardware")

    def _watch(self, observation: Observation) -> dict[int, Shift]:
        seen = zip(self._watches, observation.shares, observation.seconds, strict=True)
        found = [watch.see(share, seconds) for watch, share, seconds in seen]
        return {rank: shift for rank, shift in enumerate(found) if shift is not None}

    def _follow_shifts(self, observation: Observation, shifts: Mapping[int, Shift]) -> Plan | None:
        for rank, shift in shifts.items():
            micro = observation.micro_batches[rank] if observation.micro_batches else 1
            self._fits[rank].restart(Window.of(observation.shares[rank], shift.seconds, micro))
        self._window = []
        words = "; ".join(_shifted(self.batch.names[rank], shift) for rank, shift in shifts.items())
        plan = self._replan(words, _MIN_GAIN_OF_A_SHIFT)
        if plan is None:
            self._window_steps = _NEXT_WINDOW
        return plan

    def _is_ambiguous(self) -> bool:
        """Two steps that say different things about a rank."""
        if len(self._window) != 2:
            return False
        pairs = zip(self._window[0].seconds, self._window[1].seconds, strict=True)
        return any(max(pair) > _DISAGREE * min(pair) for pair in pairs)

    def _close_window(self) -> Plan | None:
        steps, self._window = self._window, []
        for rank, fit in enumerate(self._fits):
            micro = steps[-1].micro_batches[rank] if steps[-1].micro_batches else 1
            window = Window.of(steps[-1].shares[rank], [step.seconds[rank] for step in steps], micro)
            optimizer = [step.optimizer_s[rank] for step in steps if step.optimizer_s]
            fit.add(window, median(optimizer) if optimizer else 0.0)
        plan = self._replan(f"measured over {len(steps)} steps", max(_MIN_GAIN, self._error_of_a_gain(len(steps))))
        if plan is None:
            self._window_steps = min(_MAX_WINDOW, max(_NEXT_WINDOW, 2 * self._window_steps))
        return plan

    def _error_of_a_gain(self, steps: int) -> float:
        """Compares two times, each the largest of several ranks: the least certain rank may decide."""
        compared = _COMPARED if steps <= _NEXT_WINDOW else _COMPARED_LONG
        return min(_MAX_ERROR, compared * max(fit.error for fit in self._fits))

    def _replan(self, why: str, least_gain: float) -> Plan | None:
        if self.mode is not Mode.ADAPTIVE or not self.is_informed:
            return None
        costs, best = self.costs(), self._best_shares()
        shares = self._towards(best)
        now = slowest_s(costs, self.plan.shares) + self.communication_s
        then = slowest_s(costs, shares) + self.communication_s
        if shares == self.plan.shares or then > now * (1 - least_gain):
            return None
        more = "; more may follow" if shares != best else ""
        return self._adopt(
            shares, f"{why}: a step should take {then * 1000:.0f} ms instead of {now * 1000:.0f} ms{more}"
        )

    def _towards(self, best: tuple[int, ...]) -> tuple[int, ...]:
        """As far as one plan may go; all the way where the limits of memory leave no room for that."""
        now = self.plan.shares
        reach = [Bounds(max(self.batch.least, -(-share // _MAX_MOVE)), share * _MAX_MOVE) for share in now]
        if all(bound.least <= share <= (bound.most or 0) for bound, share in zip(reach, best, strict=True)):
            return best
        try:
            return self._best_shares(reach)
        except Unsatisfiable:
            return best

    def _best_shares(self, within: Sequence[Bounds] = ()) -> tuple[int, ...]:
        batch = self.batch
        costs = self.costs() if self.mode is Mode.ADAPTIVE else self._costs_by_speed()
        free = list(within) or [Bounds(batch.least)] * batch.ranks
        free = [bound.within(one) for bound, one in zip(free, self._most(), strict=True)]
        accumulating = split(costs, batch.total, free, batch.granule)
        bounds = [bound.within(cap) for bound, cap in zip(free, self.caps, strict=True)]
        # What some ranks leave to others may be more than those hold at once.
        must_accumulate = self.can_accumulate and not within and not self._have_room(bounds)
        if bounds == free or must_accumulate or not self._have_room([Bounds(1, cap) for cap in self.caps]):
            return accumulating
        at_once = split(costs, batch.total, bounds, batch.granule)
        gain = slowest_s(costs, at_once) / slowest_s(costs, accumulating)
        is_worth_it = self.can_accumulate and self.is_informed and gain > _GAIN_OF_ACCUMULATING
        return accumulating if is_worth_it else at_once

    def _costs_by_speed(self) -> list[Cost]:
        speeds = (() if self.mode is Mode.OFF else self.speeds) or (1.0,) * self.batch.ranks
        return [Cost(per_sample_s=1 / speed, cap=cap) for speed, cap in zip(speeds, self.caps, strict=True)]

    def _adopt(self, shares: tuple[int, ...], reason: str) -> Plan:
        moved = max(max(old, new) / min(old, new) for old, new in zip(self.plan.shares, shares, strict=True))
        self.plan = self._planned(shares, reason)
        self._window, self._window_steps = [], _SOON_WINDOW if moved >= _LARGE_MOVE else _NEXT_WINDOW
        return self.plan

    def _planned(self, shares: tuple[int, ...], reason: str) -> Plan:
        costs = self.costs()
        micro = tuple(cost.micro_batches(share) for cost, share in zip(costs, shares, strict=True))
        predicted = slowest_s(costs, shares) + self.communication_s if self.is_informed else None
        return Plan(shares, micro, reason, predicted)


def _shifted(name: str, shift: Shift) -> str:
    if shift.factor >= 1:
        return f"{name} takes {shift.factor:.1f} times as long as before"
    return f"{name} is {1 / shift.factor:.1f} times as fast as before"


def _fit(state: Mapping[str, Any]) -> RankFit:
    windows = [Window(**window) for window in state["windows"]]
    return RankFit(float(state["fixed_ratio"]), float(state["optimizer_s"]), windows)
