"""Which backups are kept: the newest, then fewer the older they are, within a bound."""

from __future__ import annotations

from ugro.kernel.agent.rules import BackupFile, has_room, to_remove

MINUTE_S = 60.0
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S
NOW = 20_000 * DAY_S + 12 * HOUR_S  # noon
MB = 10**6


def made(ages_s: list[float], size: int = MB, schema: int = 10) -> list[BackupFile]:
    """The oldest first, as they were made."""
    ordered = sorted(ages_s, reverse=True)
    return [BackupFile(number, NOW - age_s, size, schema) for number, age_s in enumerate(ordered, start=1)]


def kept_ages(files: list[BackupFile], now: float = NOW, most_bytes: int = 10**9) -> list[float]:
    gone = set(to_remove(files, now, most_bytes))
    return sorted(now - file.made_at for file in files if file not in gone)


def live(days: float, every_s: float = 10 * MINUTE_S) -> list[BackupFile]:
    """A folder after an agent has made and removed backups for so long."""
    files: list[BackupFile] = []
    for number in range(int(days * DAY_S / every_s) + 1):
        now = NOW - days * DAY_S + number * every_s
        files.append(BackupFile(number, now, MB, 10))
        gone = set(to_remove(files, now))
        files = [file for file in files if file not in gone]
    return files


def test_the_newest_six_are_kept() -> None:
    ages = [number * MINUTE_S for number in range(6)]
    assert kept_ages(made([*ages, 20 * MINUTE_S])) == ages


def test_after_weeks_there_is_one_for_each_hour_of_a_day_and_one_for_each_day_of_a_week() -> None:
    files = live(20)
    ages = sorted(NOW - file.made_at for file in files)
    assert ages[:6] == [number * 10 * MINUTE_S for number in range(6)]
    hours = {(NOW - age_s) // HOUR_S for age_s in ages if age_s <= DAY_S}
    assert len(hours) >= 24
    days = {(NOW - age_s) // DAY_S for age_s in ages}
    assert len(days) in (7, 8)
    assert len(files) <= 6 + 25 + 8
    assert max(ages) <= 7 * DAY_S


def test_old_ones_stay_while_nothing_newer_was_made() -> None:
    """An agent that was off for a month has the backups of its last day."""
    ages = [30 * DAY_S + number * MINUTE_S for number in range(9)]
    assert kept_ages(made(ages)) == ages[:6]


def test_a_bound_of_size_takes_the_oldest_and_leaves_two() -> None:
    ages = [number * MINUTE_S for number in range(6)]
    assert kept_ages(made(ages), most_bytes=4 * MB) == ages[:4]
    assert kept_ages(made(ages), most_bytes=1) == ages[:2]


def test_the_newest_of_an_older_schema_is_kept_for_a_week() -> None:
    before = [BackupFile(number, NOW - 2 * HOUR_S + number, MB, 9) for number in range(3)]
    after = [BackupFile(10 + number, NOW - 2 * HOUR_S + 100 + number, MB, 10) for number in range(8)]
    gone = to_remove([*before, *after], NOW)
    assert before[2] not in gone
    assert set(before[:2]) <= set(gone)
    assert before[2] in to_remove([*before, *after], NOW + 8 * DAY_S)


def test_a_clock_that_was_wrong_for_a_while_costs_no_new_backup() -> None:
    """The newest are those that were made last, whatever the clock said."""
    wrong = [BackupFile(number, NOW + 400 * DAY_S + number, MB, 10) for number in range(1, 8)]
    right = [BackupFile(7 + number, NOW + number, MB, 10) for number in range(1, 7)]
    gone = to_remove([*wrong, *right], NOW + 10)
    assert not set(right) & set(gone)
    assert set(wrong) == set(gone)


def test_nothing_is_too_old_while_the_clock_is_not_believed() -> None:
    files = made([number * DAY_S for number in range(30)])
    assert to_remove(files, None, most_bytes=10**9) == []
    assert len(to_remove(files, None, most_bytes=10 * MB)) == 20


def test_a_backup_leaves_the_disk_some_space() -> None:
    assert has_room(state_bytes=10 * MB, free_bytes=300 * MB)
    assert not has_room(state_bytes=10 * MB, free_bytes=100 * MB)
