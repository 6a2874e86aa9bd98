"""What is done about a wall clock that was set."""

from __future__ import annotations

import pytest

from ugro.kernel.agent.rules import DAY_S, Jump, Memory, is_doubtful, is_held, look, recent_jump, released
from ugro.kernel.support.moments import Instant, Reading

HOUR_S = 3600.0
YEAR_S = 365 * DAY_S
SEEN = Memory(Instant(1e9, "a", 1000.0))


def later(by_s: float, jump_s: float = 0.0, boot: str = "a") -> Instant:
    boot_s = 1000.0 + by_s if boot == "a" else 30.0
    return Instant(1e9 + by_s + jump_s, boot, boot_s)


def reading(now: Instant, age_s: float = 0.0, *, is_doubtful: bool = False) -> Reading:
    return Reading(now, Instant(now.wall_s - age_s, now.boot_id, now.boot_s - age_s), is_doubtful)


def jump_of(now: Instant, known: Memory = SEEN) -> Jump:
    jump = look(known, now)[1]
    assert jump is not None
    return jump


@pytest.mark.parametrize("jump_s", [-YEAR_S, -2 * HOUR_S, -2.0, 2.0, 2 * HOUR_S, 10 * YEAR_S])
def test_a_clock_that_is_set_is_noticed_by_how_much(jump_s: float) -> None:
    assert jump_of(later(1.0, jump_s)).by_s == pytest.approx(jump_s, abs=1e-3)


@pytest.mark.parametrize(("passed_s", "off_s"), [(2.0, 0.5), (2.0, -0.9), (DAY_S, 40.0), (0.0, 0.0)])
def test_a_clock_that_is_corrected_slowly_was_not_set(passed_s: float, off_s: float) -> None:
    assert look(SEEN, later(passed_s, off_s))[1] is None


def test_what_was_seen_first_is_no_jump() -> None:
    assert look(None, later(5.0)) == (Memory(later(5.0)), None)


def test_only_a_jump_forward_that_makes_things_old_holds_removals_until_their_notice_is_over() -> None:
    for jump_s in (-YEAR_S, 60.0):
        assert look(SEEN, later(1.0, jump_s))[0].held is None
    known, _ = look(SEEN, now := later(1.0, 2 * HOUR_S))
    assert is_held(known, reading(now), 0.0)
    assert is_held(known, reading(later(DAY_S, 2 * HOUR_S)), 0.0)
    assert not is_held(known, reading(later(DAY_S + 2, 2 * HOUR_S)), 0.0)
    assert is_held(known, reading(later(DAY_S + 2, 2 * HOUR_S)), 7 * DAY_S), "a longer notice holds longer"
    assert is_held(known, reading(later(2.0, 10 * YEAR_S)), 0.0), "the notice runs by the clock of the boot"
    assert not is_held(released(known), reading(now), 0.0)


@pytest.mark.parametrize(("years", "words"), [(10, "3650d1h have passed"), (-10, "3649d23h behind")])
def test_after_a_restart_a_clock_that_is_years_off_is_not_believed_until_it_is_set(years: int, words: str) -> None:
    known, jump = look(SEEN, now := later(HOUR_S, years * YEAR_S, "b"))
    assert jump is not None
    assert words in jump.text
    assert is_doubtful(known, now)
    assert is_held(known, reading(now), 0.0)
    corrected = Instant(1e9 + HOUR_S + 60, "b", 90.0)
    known, _ = look(known, corrected)
    assert not is_doubtful(known, corrected)
    assert is_held(known, reading(corrected), 0.0), "removals wait: something may have been stored with wrong times"


def test_a_second_restart_with_the_same_wrong_clock_does_not_make_it_right() -> None:
    known, _ = look(SEEN, later(HOUR_S, 10 * YEAR_S, "b"))
    known, jump = look(known, again := later(2 * HOUR_S, 10 * YEAR_S, "c"))
    assert jump is not None
    assert is_doubtful(known, again)


def test_a_machine_that_was_off_for_a_weekend_is_believed() -> None:
    known, jump = look(SEEN, now := later(3 * DAY_S, 0.0, "b"))
    assert jump is None
    assert not is_doubtful(known, now)
    assert known.held is None


def test_doctor_names_a_jump_for_a_day() -> None:
    known, jump = look(SEEN, later(1.0, -50.0))
    assert recent_jump(known, later(HOUR_S, -50.0)) == jump
    assert recent_jump(known, later(2 * DAY_S, -50.0)) is None
