"""Decides how many replicas a service needs, and the weight of each at the door, from its requests.

More at once, when it is needed for a moment; fewer slowly, by one, and only if the rest would still have room. A number
that proved too small is not tried again for a while, which doubles each time: under a constant load the number settles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ugro.features.services.model import EVEN_WEIGHT, MOST_WEIGHT, Pace

MOST_GROWTH = 2.0  # of the number in one step
ROOM = 0.75  # of the targets, at most, may be used after a step down
_FIRST_BAN_S = 1800.0
_LONGEST_BAN_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """``target_sessions``: requests at once per replica. ``target_p90_s``: None: times do not count."""

    least: int = 1
    most: int = 1
    target_sessions: float = 4.0
    target_p90_s: float | None = None
    up_after_s: float = 5.0
    down_after_s: float = 120.0
    idle_s: float = 600.0  # without a request, before the last replica goes; only with ``least`` 0
    pause_s: float = 30.0  # after a change, until the new replicas show in what is measured


@dataclass(frozen=True, slots=True)
class Load:
    """What the door says, at ``now_s``."""

    now_s: float
    sessions: int  # also those that wait
    queued: int
    held: int
    requests: int  # ever
    ready: int  # replicas that serve
    p90_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the rule must remember between two looks."""

    changed_at_s: float = -math.inf
    above_since_s: float | None = None
    below_since_s: float | None = None
    requests: int = 0
    request_at_s: float | None = None  # the last time at which there was one
    banned: int = -1  # this number and less proved too small,
    banned_until_s: float = -math.inf
    ban_s: float = 0.0
    came_down_to: int | None = None


@dataclass(frozen=True, slots=True)
class Scaled:
    wanted: int
    reason: str
    state: ScalingState


def scale(rule: ScalingRule, load: Load, wanted: int, state: ScalingState) -> Scaled:
    """``wanted``: the number so far."""
    state = _noted(state, load)
    bounded = min(max(wanted, rule.least), rule.most)
    if bounded != wanted:
        return _changed(bounded, f"between {rule.least} and {rule.most}", load, state)
    if load.held and wanted == 0:
        return _changed(1, f"{load.held} requests wait for a first replica", load, state)
    needed, reason = _needed(rule, load, wanted)
    state = _timed(rule, load, wanted, needed, state)
    if load.now_s - state.changed_at_s < rule.pause_s:
        return Scaled(wanted, "a change shows its effect first", state)
    if needed > wanted and _has_lasted(state.above_since_s, rule.up_after_s, load):
        if load.ready < wanted:  # they start, or there is no room for them; fewer are possible at any time
            return Scaled(wanted, f"{load.ready} of {wanted} are ready", state)
        return _grown(rule, load, wanted, needed, reason, state)
    return _shrunk(rule, load, wanted, state)


def _needed(rule: ScalingRule, load: Load, wanted: int) -> tuple[int, str]:
    by_sessions = math.ceil(load.sessions / rule.target_sessions)
    found = by_sessions, f"{load.sessions} requests at once, {rule.target_sessions:g} per replica"
    if rule.target_p90_s and load.p90_s > rule.target_p90_s and load.sessions >= wanted > 0:
        by_time = math.ceil(wanted * min(MOST_GROWTH, load.p90_s / rule.target_p90_s))
        if by_time > by_sessions:
            found = by_time, f"p90 of {load.p90_s:.3g} s, {rule.target_p90_s:g} s are wanted"
    return found


def _grown(rule: ScalingRule, load: Load, wanted: int, needed: int, reason: str, state: ScalingState) -> Scaled:
    if wanted >= rule.most:
        return Scaled(wanted, f"{reason}; {rule.most} is the most", state)
    target = min(rule.most, needed, max(wanted + 1, math.floor(wanted * MOST_GROWTH)))
    if state.came_down_to is not None and wanted <= state.came_down_to:
        # It was left for fewer, and these were too few: the number before them was enough.
        target = min(target, state.came_down_to + 1)
        ban_s = min(_LONGEST_BAN_S, max(_FIRST_BAN_S, state.ban_s * 2))
        state = replace(state, banned=wanted, banned_until_s=load.now_s + ban_s, ban_s=ban_s, came_down_to=None)
    return _changed(target, reason, load, state)


def _shrunk(rule: ScalingRule, load: Load, wanted: int, state: ScalingState) -> Scaled:
    if wanted <= rule.least:
        return Scaled(wanted, "as few as allowed", state)
    if wanted == 1:
        return _to_none(rule, load, state)
    fewer = wanted - 1
    if fewer <= state.banned and load.now_s < state.banned_until_s:
        return Scaled(wanted, f"{fewer} proved too few", state)
    if not _has_lasted(state.below_since_s, rule.down_after_s, load):
        return Scaled(wanted, "as needed", state)
    return _changed(
        fewer, f"{load.sessions} requests at once: {fewer} are enough", load, replace(state, came_down_to=fewer)
    )


def _to_none(rule: ScalingRule, load: Load, state: ScalingState) -> Scaled:
    quiet_s = load.now_s - (state.request_at_s if state.request_at_s is not None else load.now_s)
    if load.sessions or quiet_s < rule.idle_s:
        return Scaled(1, "as needed", state)
    return _changed(0, f"no request for {quiet_s:.0f} s", load, state)


def _fits(rule: ScalingRule, load: Load, fewer: int, wanted: int) -> bool:
    """So many replicas would have room left."""
    has_slots = load.queued == 0 and load.sessions <= ROOM * fewer * rule.target_sessions
    is_quick = rule.target_p90_s is None or load.p90_s * wanted / fewer <= ROOM * rule.target_p90_s
    return has_slots and is_quick


def _noted(state: ScalingState, load: Load) -> ScalingState:
    is_used = load.requests != state.requests or load.sessions > 0 or state.request_at_s is None
    return replace(state, requests=load.requests, request_at_s=load.now_s if is_used else state.request_at_s)


def _timed(rule: ScalingRule, load: Load, wanted: int, needed: int, state: ScalingState) -> ScalingState:
    is_above = needed > wanted
    is_below = wanted > 1 and not is_above and _fits(rule, load, wanted - 1, wanted)
    above = (state.above_since_s if state.above_since_s is not None else load.now_s) if is_above else None
    below = (state.below_since_s if state.below_since_s is not None else load.now_s) if is_below else None
    return replace(state, above_since_s=above, below_since_s=below)


def _has_lasted(since_s: float | None, for_s: float, load: Load) -> bool:
    return since_s is not None and load.now_s - since_s >= for_s


def _changed(wanted: int, reason: str, load: Load, state: ScalingState) -> Scaled:
    return Scaled(wanted, reason, replace(state, changed_at_s=load.now_s, above_since_s=None, below_since_s=None))


# --- weights ----------------------------------------------------------------------------------------------------------
# How the requests of a service are shared out: weights of its replicas, learned from the time that each one takes.
#
# A replica's time depends on how much it has to do at once. One that computes a request after the other takes n times
# as long for n of them; one that batches takes about as long for all. So the times are compared at an equal number of
# requests: ``t = s · n^e``, with one ``e`` for all replicas, learned from how their times vary with n, and a weight of
# ``1 / s``. A wrong ``e`` is no danger: a weight changes n, n changes the time by ``e``, and as long as the guess is
# less than 1 away from the truth, which is between 0 and 1, each correction is smaller than the one before.


LEAST_REQUESTS = 20.0  # of a replica, before its times count
MEMORY_S = 60.0  # what is older counts less than a third
FACTOR_PER_MINUTE = 2.0
DEAD_BAND = 0.08  # a weight that would change by less stays
SLOW_START_S = 30.0
_FIRST_SHARE = 0.25  # of its weight, for a replica that has just become ready
_GUESS = 0.5  # of e
_GUESS_STRENGTH = 20.0  # against the spread of n that was seen


@dataclass(frozen=True, slots=True)
class Learned:
    """Of one replica."""

    speed: float  # relative to the others; the last one that was used
    since_s: float  # when it was first seen
    seen: Pace = field(default_factory=Pace)  # its sums at the last look
    recent: Pace = field(default_factory=Pace)  # what came since, faded
    weight: int = EVEN_WEIGHT


@dataclass(frozen=True, slots=True)
class Weighing:
    """What is known of all replicas; ``next_weights`` returns the next one."""

    replicas: Mapping[str, Learned] = field(default_factory=dict)
    at_s: float = 0.0

    @property
    def weights(self) -> dict[str, int]:
        return {name: one.weight for name, one in self.replicas.items()}


def adopted(weights: Mapping[str, int], now_s: float) -> Weighing:
    """What a door had when its agent came back: neither learned again nor started slowly."""
    found = {
        name: Learned(weight / EVEN_WEIGHT, now_s - SLOW_START_S, weight=weight) for name, weight in weights.items()
    }
    return Weighing(found, now_s)


def next_weights(before: Weighing, paces: Mapping[str, Pace], first: Mapping[str, float], now_s: float) -> Weighing:
    """``first``: speeds of replicas as far as they are known beforehand, such as their devices'. New ones get them."""
    passed_s = max(0.0, now_s - before.at_s) if before.replicas else 0.0
    known = _with_new(before, paces, first, now_s)
    looked = {name: _looked(known[name], pace, passed_s) for name, pace in paces.items()}
    speeds = _moved(looked, _measured(looked), passed_s)
    return Weighing(
        {name: replace(one, speed=speeds[name]) for name, one in _weighed(looked, speeds, now_s).items()}, now_s
    )


def weight_of_new(before: Weighing, name: str, first: Mapping[str, float], now_s: float) -> int:
    """What a replica gets that is about to come. ``first``: also of others that come with it."""
    coming = {one: before.replicas[one].seen if one in before.replicas else Pace() for one in (*first, name)}
    known = {one: learned.seen for one, learned in before.replicas.items()}
    return next_weights(before, {**coming, **known}, first, now_s).weights[name]


def elasticity(recent: Mapping[str, Pace]) -> float:
    """``e``: by how much times grow with n, from the variation within each replica."""
    spread = _GUESS_STRENGTH * 0.1
    together = _GUESS * spread
    for pace in recent.values():
        if pace.count >= 2:
            spread += max(0.0, pace.xx - pace.x * pace.x / pace.count)
            together += pace.xy - pace.x * pace.y / pace.count
    return min(1.0, max(0.0, together / spread))


def _with_new(
    before: Weighing, paces: Mapping[str, Pace], first: Mapping[str, float], now_s: float
) -> dict[str, Learned]:
    """By what is given, in the scale of those that are known: their learned speeds against what was given of them."""
    known = {name: before.replicas[name] for name in paces if name in before.replicas}
    new = [name for name in paces if name not in known]
    given = {name: first[name] for name in paces if first.get(name, 0) > 0}
    usual = _mean([one.speed for one in known.values()])
    both = [known[name].speed / given[name] for name in known if name in given]
    scale = _mean(both) if both else usual / _mean(list(given.values()))
    return {**known, **{name: Learned(given[name] * scale if name in given else usual, now_s) for name in new}}


def _looked(one: Learned, pace: Pace, passed_s: float) -> Learned:
    """Sums only grow, unless the door was started again."""
    base = one.seen if pace.count >= one.seen.count else Pace()
    fade = math.exp(-passed_s / MEMORY_S)
    recent = Pace(
        *(
            getattr(one.recent, name) * fade + getattr(pace, name) - getattr(base, name)
            for name in ("count", "x", "y", "xx", "xy")
        )
    )
    return replace(one, seen=pace, recent=recent)


def _measured(looked: Mapping[str, Learned]) -> dict[str, float]:
    """Logarithms of speeds at an equal number of requests, of those that had enough of them."""
    enough = {name: one.recent for name, one in looked.items() if one.recent.count >= LEAST_REQUESTS}
    e = elasticity(enough)
    return {name: e * pace.x / pace.count - pace.y / pace.count for name, pace in enough.items()}


def _moved(looked: Mapping[str, Learned], measured: Mapping[str, float], passed_s: float) -> dict[str, float]:
    """Toward what was measured, relative to those that were measured, and no faster than is allowed."""
    if len(measured) < 2:
        return {name: one.speed for name, one in looked.items()}
    step = math.log(FACTOR_PER_MINUTE) * passed_s / 60
    offset = sum(math.log(looked[name].speed) - value for name, value in measured.items()) / len(measured)
    speeds = {}
    for name, one in looked.items():
        now = math.log(one.speed)
        wanted = measured[name] + offset if name in measured else now
        speeds[name] = math.exp(now + max(-step, min(step, wanted - now)))
    return speeds


def _weighed(looked: Mapping[str, Learned], speeds: Mapping[str, float], now_s: float) -> dict[str, Learned]:
    fastest = max(speeds.values(), default=1.0)
    found = {}
    for name, one in looked.items():
        full = EVEN_WEIGHT * speeds[name] / fastest
        wanted = min(MOST_WEIGHT, max(1, round(full * _started(now_s - one.since_s, len(looked)))))
        is_far = abs(wanted - one.weight) > DEAD_BAND * one.weight
        found[name] = replace(one, weight=wanted if is_far else one.weight)
    return found


def _started(age_s: float, count: int) -> float:
    """The share of its weight that a replica gets at its age; one that is alone has nobody to spare it."""
    if count == 1 or age_s >= SLOW_START_S:
        return 1.0
    return _FIRST_SHARE + (1 - _FIRST_SHARE) * max(0.0, age_s) / SLOW_START_S


def _mean(values: list[float]) -> float:
    """The geometric one; 1 of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0
