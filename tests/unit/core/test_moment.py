"""Durations by the clock of a boot: whoever sets the wall clock changes none of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.moments import PATIENCE_S, Instant, Reading, due_s, elapsed_s, instant_of, place_s, shown_s

BOOT, OTHER = "aaaa", "bbbb"
seconds = st.floats(0, 1e8)
walls = st.floats(-1e9, 1e10)
durations = st.floats(0, 1e7)


def reading(wall_s: float, boot_s: float, age_s: float, *, is_doubtful: bool = False) -> Reading:
    now = Instant(wall_s, BOOT, boot_s)
    return Reading(now, Instant(wall_s - age_s, BOOT, boot_s - age_s), is_doubtful)


@given(walls, walls, seconds, seconds)
def test_within_a_boot_the_wall_clock_does_not_matter(one: float, two: float, begin: float, length: float) -> None:
    since, until = Instant(one, BOOT, begin), Instant(two, BOOT, begin + length)
    assert elapsed_s(since, until) == until.boot_s - since.boot_s
    assert due_s(since, length, reading(two, begin + length, 0.0)) == begin + length


@given(walls, walls, seconds, seconds)
def test_no_duration_is_negative(one: float, two: float, begin: float, end: float) -> None:
    for boot in (BOOT, OTHER, ""):
        assert elapsed_s(Instant(one, BOOT, begin), Instant(two, boot, end)) >= 0


@given(walls, walls, seconds, st.floats(0, 1e6), durations, st.booleans())
def test_after_a_restart_a_duration_is_over_neither_at_once_nor_never(
    before: float, now: float, boot_s: float, age_s: float, length: float, is_doubtful: bool
) -> None:
    by = reading(now, boot_s, age_s, is_doubtful=is_doubtful)
    due = due_s(Instant(before, OTHER, 5.0), length, by)
    assert by.started.boot_s + min(length, PATIENCE_S) <= due <= by.started.boot_s + length


def test_after_a_restart_the_wall_clock_counts_what_has_passed_meanwhile() -> None:
    since = Instant(10_000.0, OTHER, 77_777.0)
    assert due_s(since, 7200.0, reading(13_600.0, 400.0, 100.0)) == 400.0 + 3600.0
    assert due_s(since, 7200.0, reading(13_600.0, 400.0, 100.0, is_doubtful=True)) == 300.0 + 7200.0
    assert elapsed_s(since, Instant(13_600.0, BOOT, 400.0)) == 3600.0


@given(walls, walls, walls)
def test_what_was_submitted_keeps_its_place_when_the_clock_is_set(at: float, started: float, now: float) -> None:
    begin = Instant(started, BOOT, 100.0)
    places = {place_s(Instant(at, OTHER, 5.0), Reading(Instant(wall, BOOT, 500.0), begin)) for wall in (started, now)}
    assert len(places) == 1
    assert places.pop() <= 100.0


def test_a_stored_time_is_read_as_it_was_and_without_a_boot_has_only_a_wall_clock() -> None:
    stored = Instant(1_700_000_000.123, BOOT, 12.5)
    assert instant_of(stored.at, stored.boot) == stored
    for unknown in (None, "", "what is this", BOOT):
        assert instant_of(stored.at, unknown) == Instant(1_700_000_000.123)


def test_an_age_is_shown_by_the_wall_clock_as_it_goes_now_and_otherwise_the_time_as_it_was_stored() -> None:
    at = Instant(1000.0, BOOT, 50.0)
    assert shown_s(at, Instant(1060.3, BOOT, 110.0)) == 1000.0
    assert shown_s(at, Instant(8260.0, BOOT, 110.0)) == 8200.0
    assert shown_s(at, Instant(99.0, OTHER, 5.0)) == 1000.0
