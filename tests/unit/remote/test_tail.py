"""How often a file that grows is looked at."""

from __future__ import annotations

import pytest

from ugro.node.runs.logs import Pace


def longest_pause_s(pace: Pace) -> float:
    for _ in range(20):
        pace.found_nothing()
    return pace.pause_s


@pytest.mark.parametrize(("every_s", "late_s"), [(0.01, 0.02), (0.2, 0.02), (1.0, 0.1), (60.0, 0.2)])
def test_a_file_that_is_followed_promptly_is_late_by_a_small_part_of_a_step(every_s: float, late_s: float) -> None:
    pace = Pace(promptly=True)
    assert longest_pause_s(pace) == 0.05, "before the first piece"
    pace.found(100.0)
    pace.found(100.0 + every_s)
    assert longest_pause_s(pace) == pytest.approx(late_s)


def test_a_log_is_looked_at_less_and_less_often_until_it_grows() -> None:
    pace = Pace(promptly=False)
    pace.found(100.0)
    pace.found(100.2)
    assert pace.pause_s == 0.02
    assert longest_pause_s(pace) == 0.2
