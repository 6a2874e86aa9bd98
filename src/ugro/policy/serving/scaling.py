"""How many replicas a service needs: from how many requests there are at once, and how long they take.

More at once, when it is needed for a moment; fewer slowly, by one, and only if the rest would still have room. A number
that proved too small is not tried again for a while, which doubles each time: under a constant load the number settles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
