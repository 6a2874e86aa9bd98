"""How many replicas there are: bounded, settled under a constant load, none when nobody asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ugro.features.services.rules.load import Load, Scaled, ScalingRule, ScalingState, scale

RULE = ScalingRule(least=1, most=8, target_sessions=4, down_after_s=60, pause_s=20, up_after_s=5)
LOOK_S = 2.0
Sessions = Callable[[float, int], int]  # at a time, with so many replicas


def run(
    rule: ScalingRule, sessions: Sessions, seconds: float, p90_s: Callable[[int], float] = lambda n: 0.1
) -> list[int]:
    """The number at each look. A replica is ready 10 s after it was wanted."""
    wanted, state, found, ready_at = rule.least, ScalingState(), [], [(0.0, rule.least)]
    for step in range(int(seconds / LOOK_S)):
        now_s = step * LOOK_S
        ready = [number for at_s, number in ready_at if at_s <= now_s][-1]
        at_once = sessions(now_s, ready)
        held = at_once if ready == 0 else 0
        load = Load(now_s, at_once, held, held, step * (at_once > 0), ready, p90_s(max(1, ready)) if at_once else 0.0)
        scaled = scale(rule, load, wanted, state)
        if scaled.wanted != wanted:
            ready_at.append((now_s + 10 if scaled.wanted > wanted else now_s, scaled.wanted))
        wanted, state = scaled.wanted, scaled.state
        found.append(wanted)
    return found


def changes(found: list[int]) -> int:
    return sum(a != b for a, b in pairwise(found))


def test_more_requests_get_more_replicas_and_fewer_get_fewer() -> None:
    found = run(RULE, lambda now_s, _: 20 if now_s < 300 else 2, 1200)
    assert max(found[:150]) == 5
    assert found[149] == 5
    assert found[-1] == 1


def test_a_peak_of_a_moment_changes_nothing() -> None:
    assert changes(run(RULE, lambda now_s, _: 30 if 100 <= now_s < 104 else 2, 300)) == 0


def test_none_is_left_when_nobody_asks_and_the_first_request_brings_one_back() -> None:
    rule = replace(RULE, least=0, idle_s=120)
    found = run(rule, lambda now_s, _: 1 if now_s < 20 or 600 <= now_s < 640 else 0, 1200)
    assert found[5] == 1
    assert found[200] == 0, "after two quiet minutes"
    assert found[301] == 1, "at once"
    assert found[-1] == 0


def test_a_time_that_is_too_long_brings_more() -> None:
    rule = replace(RULE, target_p90_s=1.0, target_sessions=100)
    found = run(rule, lambda now_s, _: 10, 600, lambda n: 4 / n)
    assert found[-1] in (4, 5)
    assert changes(found[150:]) <= 1


def test_nothing_grows_while_what_was_asked_for_is_not_ready() -> None:
    state = ScalingState()
    for step in range(200):
        scaled = scale(RULE, Load(step * LOOK_S, 100, 0, 0, step, ready=1), 2, state)
        state = scaled.state
        assert scaled.wanted == 2


def test_what_never_gets_ready_keeps_no_devices_when_nobody_asks() -> None:
    """Of eight there is room for two: they go, too, when they are not needed."""
    rule, wanted, state = replace(RULE, least=0, idle_s=120), 8, ScalingState()
    for step in range(600):
        scaled = scale(rule, Load(step * LOOK_S, 0, 0, 0, 7, ready=min(wanted, 2)), wanted, state)
        wanted, state = scaled.wanted, scaled.state
    assert wanted == 0


@given(
    st.integers(0, 3),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.floats(0, 30)), max_size=40),
)
def test_the_number_is_always_within_its_bounds(least: int, more: int, looks: list[tuple[int, int, float]]) -> None:
    rule = replace(RULE, least=least, most=least + more, target_p90_s=1.0)
    scaled = Scaled(5, "", ScalingState())
    for step, (sessions, ready, p90_s) in enumerate(looks):
        load = Load(step * 7.0, sessions, sessions // 2, 0 if ready else sessions // 2, step, ready, p90_s)
        scaled = scale(rule, load, scaled.wanted, scaled.state)
        assert rule.least <= scaled.wanted <= rule.most
        assert scaled.reason


@given(st.floats(0.5, 30), st.floats(0.1, 5), st.floats(0, 0.4), st.integers(0, 2**32))
@example(3.5625, 0.25, 0.0, 0)  # one fewer fills all of them, and doubling then brought twice as many
def test_a_constant_load_does_not_make_it_swing(work: float, unit_s: float, jitter: float, seed: int) -> None:
    """``work``: replicas' worth of requests; each takes longer the fuller the replicas are."""
    rule = replace(RULE, most=20, target_p90_s=2.0)

    def fullness(n: int) -> float:
        return min(0.95, work / n)

    def sessions(now_s: float, n: int) -> int:
        noise = math.sin(now_s * 0.7 + seed) * jitter
        return max(0, round(work * (1 + noise) / (1 - fullness(n)))) if n else round(work)

    found = run(rule, sessions, 5400, lambda n: unit_s / (1 - fullness(n)))
    assert changes(found[-1800:]) <= 4, "in the last hour"


@pytest.mark.parametrize("wanted", [0, 30])
def test_new_bounds_hold_at_once(wanted: int) -> None:
    assert RULE.least <= scale(RULE, Load(0, 0, 0, 0, 0, 0), wanted, ScalingState()).wanted <= RULE.most
