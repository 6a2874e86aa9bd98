from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.moments import delay_s, denied_pause_s

attempts = st.integers(min_value=-3, max_value=10**6)
ratios = st.floats(min_value=0, max_value=1)


def test_the_wait_doubles_with_each_failure() -> None:
    assert [delay_s(attempt, 1.0) for attempt in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]


def test_chance_takes_away_at_most_half_of_the_wait() -> None:
    assert delay_s(3, 0.0) == 1.0
    assert delay_s(3, 0.5) == 1.5
    assert delay_s(3, 1.0) == 2.0


def test_the_wait_ends_growing_at_the_cap() -> None:
    assert delay_s(7, 1.0) == 30.0
    assert delay_s(100, 1.0, cap_s=7) == 7.0


@given(attempts, ratios)
def test_a_wait_is_never_nothing_and_never_over_the_cap(attempt: int, ratio: float) -> None:
    assert 0.25 <= delay_s(attempt, ratio) <= 30.0


@given(attempts, ratios)
def test_one_more_failure_never_shortens_the_wait(attempt: int, ratio: float) -> None:
    assert delay_s(attempt + 1, ratio) >= delay_s(attempt, ratio)


def test_a_denied_login_is_tried_after_a_minute_and_then_ever_more_rarely() -> None:
    assert [denied_pause_s(denials, 0.0) for denials in (1, 2, 3, 7, 1000)] == [60, 120, 240, 3600, 3600]
    assert denied_pause_s(1, 1.0) == 72
