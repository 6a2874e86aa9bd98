"""When hooks are called: after something has lasted, with pauses between, and so often per hour."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ugro.features.hooks.rules import HOUR_S, Losses, Patience, Seen, in_s, is_long, look, look_at_losses

PATIENCE = Patience(lasting_s=300.0, cool_down_s=600.0, most_per_hour=3)


def calls(patience: Patience, is_so: list[bool], step_s: float = 60.0) -> list[float]:
    seen, found = Seen(), []
    for number, one in enumerate(is_so):
        seen, is_due = look(seen, one, patience, number * step_s)
        found += [number * step_s] if is_due else []
    return found


def test_it_must_last_and_is_repeated_after_the_cool_down_as_long_as_it_lasts() -> None:
    assert calls(PATIENCE, [True] * 20) == [300.0, 900.0]


def test_an_interruption_starts_the_time_again() -> None:
    assert calls(PATIENCE, [True] * 4 + [False] + [True] * 6) == [600.0]


def test_the_budget_of_an_hour_is_not_exceeded() -> None:
    quick = Patience(0.0, 0.0, 3)
    assert calls(quick, [True] * 59) == [0.0, 60.0, 120.0]
    assert in_s(Seen(calls_s=(0.0, 60.0, 120.0)), quick, 120.0) == HOUR_S - 120.0


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 5), st.sampled_from((0.0, 60.0, 900.0)))
def test_no_way_of_swinging_calls_it_more_often_than_allowed(swings: list[bool], most: int, cool_down_s: float) -> None:
    found = calls(Patience(60.0, cool_down_s, most), swings)
    assert all(later - earlier >= cool_down_s for earlier, later in pairwise(found))
    assert all(sum(at <= other < at + HOUR_S for other in found) <= most for at in found)


def test_a_queue_that_swings_around_its_limit_counts_as_long_until_it_is_clearly_shorter() -> None:
    assert [is_long(11, 10, False), is_long(10, 10, False)] == [True, False]
    assert [is_long(9, 10, True), is_long(8, 10, True)] == [True, False]
    assert [is_long(1, 0, False), is_long(0, 0, True)] == [True, False]


def test_each_loss_is_reported_once_until_the_node_is_back() -> None:
    losses, new = look_at_losses(Losses({}), ["a", "b"], 120.0, 0.0)
    assert new == ()
    losses, new = look_at_losses(losses, ["a", "b"], 120.0, 120.0)
    assert new == ("a", "b")
    losses, new = look_at_losses(Losses(losses.since_s, frozenset({"a"})), ["a", "b"], 120.0, 180.0)
    assert new == ("b",), "the call about a was recorded, the one about b was not"
    losses, new = look_at_losses(Losses(losses.since_s, frozenset({"a", "b"})), ["b"], 120.0, 240.0)
    assert new == ()
    assert losses.reported == frozenset({"b"})
    losses, new = look_at_losses(losses, ["a", "b"], 120.0, 400.0)
    assert new == (), "its time starts again"
