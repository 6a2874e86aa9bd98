"""Which backups of the state to keep: the newest ones, then fewer the older they are, within a bound of size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_NEWEST = 6
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_HOURLY_S = _DAY_S  # one for each hour of this time
_DAILY_S = 7 * _DAY_S  # one for each day of this time
_LEAST = 2  # that any bound of size leaves
MOST_BYTES = 2 * 10**9
SPARE_BYTES = 200 * 10**6  # of the disk, that no backup uses


@dataclass(frozen=True, slots=True)
class BackupFile:
    number: int  # backups are numbered in the order in which they were made, whatever the clock said
    made_at: float
    bytes: int
    schema: int


def to_remove(files: Iterable[BackupFile], now: float | None, most_bytes: int = MOST_BYTES) -> list[BackupFile]:
    """Without ``now`` nothing is too old: the time is not known for sure."""
    newest_first = sorted(files, key=lambda file: -file.number)
    kept = _within(newest_first if now is None else _kept(newest_first, now), most_bytes)
    return [file for file in newest_first if file not in kept]


def has_room(state_bytes: int, free_bytes: int) -> bool:
    """Whether a backup leaves the disk enough for everything else."""
    return free_bytes >= state_bytes + SPARE_BYTES


def _kept(newest_first: Sequence[BackupFile], now: float) -> list[BackupFile]:
    recent = [file for file in newest_first if abs(now - file.made_at) <= _DAILY_S]
    chosen = {
        *newest_first[:_NEWEST],
        *_first_of_each(lambda file: file.made_at // _HOUR_S, [f for f in recent if abs(now - f.made_at) <= _HOURLY_S]),
        *_first_of_each(lambda file: file.made_at // _DAY_S, recent),
        # The newest of each schema: an older UGRO can be used again only with the state of its own time.
        *_first_of_each(lambda file: file.schema, recent),
    }
    return [file for file in newest_first if file in chosen]


def _first_of_each(key: Callable[[BackupFile], float], files: Iterable[BackupFile]) -> Iterable[BackupFile]:
    found: dict[float, BackupFile] = {}
    for file in files:
        found.setdefault(key(file), file)
    return found.values()


def _within(newest_first: Sequence[BackupFile], most_bytes: int) -> set[BackupFile]:
    kept: set[BackupFile] = set()
    total = 0
    for place, file in enumerate(newest_first):
        total += file.bytes
        if place < _LEAST or total <= most_bytes:
            kept.add(file)
    return kept
