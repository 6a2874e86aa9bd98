"""How often nodes are looked at, and when one is left alone."""

from __future__ import annotations

import pytest

from ugro.kernel.links.rules import Breaker, BreakerState, Limits, Pace, poll

MINUTE, HOUR = 60.0, 3600.0
LIMITS = Limits()


@pytest.mark.parametrize(
    ("jobs", "idle_s", "expected_s"),
    [
        (1, 10 * HOUR, 5),
        (7, 0, 5),
        (0, 0, 10),
        (0, 30 * MINUTE - 1, 10),
        (0, 30 * MINUTE, 20),
        (0, 2 * HOUR - 1, 20),
        (0, 2 * HOUR, 40),
        (0, 1000 * HOUR, 40),
    ],
)
def test_nodes_are_looked_at_the_less_the_longer_there_was_no_work(jobs: int, idle_s: float, expected_s: float) -> None:
    assert poll(Pace(), jobs=jobs, idle_s=idle_s).interval_s == expected_s


def test_a_node_that_did_not_answer_is_asked_again_soon() -> None:
    found = poll(Pace(), jobs=0, idle_s=10 * HOUR, failures=1)
    assert (found.interval_s, found.reason) == (5, "it did not answer the last time")


def test_no_setting_makes_the_pause_longer_than_a_minute() -> None:
    assert poll(Pace(idle_s=HOUR), jobs=0, idle_s=10 * HOUR).interval_s == 60


def failed(times: int, at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for turn in range(times):
        breaker = breaker.after(False, at + turn, LIMITS)
    return breaker


def test_three_failures_in_a_row_open_the_breaker_for_five_minutes() -> None:
    assert failed(2).state(2, LIMITS) is BreakerState.CLOSED
    opened = failed(3)  # the third at second 2
    assert opened.state(2, LIMITS) is BreakerState.OPEN
    assert opened.state(2 + 299, LIMITS) is BreakerState.OPEN
    assert opened.state(2 + 300, LIMITS) is BreakerState.HALF_OPEN
    assert "3 failures in a row; asked again in 240 s" in opened.reason(62, LIMITS)


def test_an_answer_between_failures_begins_the_count_anew() -> None:
    breaker = failed(2).after(True, 3, LIMITS).after(False, 4, LIMITS).after(False, 5, LIMITS)
    assert breaker.state(6, LIMITS) is BreakerState.CLOSED


def test_a_node_whose_link_is_new_is_asked_before_the_pause_is_over() -> None:
    opened = failed(3)
    assert opened.state(10, LIMITS, alive_since=1) is BreakerState.OPEN  # the very link that does not answer
    assert opened.state(10, LIMITS, alive_since=9) is BreakerState.HALF_OPEN
    assert opened.after(True, 10, LIMITS) == Breaker()


def test_a_failure_after_the_pause_opens_it_once_more() -> None:
    again = failed(3).after(False, 400, LIMITS)
    assert again.state(401, LIMITS) is BreakerState.OPEN
    assert again.state(700, LIMITS) is BreakerState.HALF_OPEN
