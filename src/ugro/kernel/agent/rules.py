"""Decides which backups are kept, and whether this machine's wall clock can be believed.

Within a boot, the wall clock and the clock of the boot advance together: if they do not, the wall clock was set.
Durations do not depend on it. Ages do: while a clock may be wrong by months, nothing is removed because it is old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ugro.kernel.support.moments import Instant, Reading, due_s, elapsed_s
from ugro.kernel.support.quantities import format_duration

# --- which backups are kept -------------------------------------------------------------------------------------------
# The newest ones are kept, then fewer the older they are, within a bound of size.


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


# --- whether the clock can be believed --------------------------------------------------------------------------------


DAY_S = 86400.0
_SLACK_S = 1.0
_SLEW = 0.001  # a clock that is corrected slowly
_HELD_FROM_S = 3600.0  # forward; a smaller jump makes nothing old
_BACK_S = 60.0  # of two boots: clocks differ by a little
_AWAY_S = 60 * DAY_S  # of two boots: was the machine off for so long, or is its clock wrong?


@dataclass(frozen=True, slots=True)
class Jump:
    """What the wall clock did."""

    at: Instant
    by_s: float
    is_restart: bool = False  # it was noticed when the machine had been restarted

    @property
    def text(self) -> str:
        length = format_duration(abs(self.by_s))
        if not self.is_restart:
            return f"this machine's clock was set {'forward' if self.by_s > 0 else 'back'} by {length}"
        if self.by_s > 0:
            return f"this machine was restarted, and by its clock {length} have passed since the agent last ran"
        return f"this machine was restarted, and its clock is {length} behind the time when the agent last ran"


@dataclass(frozen=True, slots=True)
class Memory:
    """Outlives the agent and the boot."""

    seen: Instant  # when it was last looked at
    before: Instant | None = None  # in an earlier boot, if the time since then cannot be believed
    held: Instant | None = None  # since when nothing is removed for its age
    jump: Jump | None = None  # the last one


def look(known: Memory | None, now: Instant) -> tuple[Memory, Jump | None]:
    if known is None:
        return Memory(now), None
    jump = _jump(known, now)
    if jump is None:
        return replace(known, seen=now), None
    is_held = jump.is_restart or jump.by_s >= _HELD_FROM_S
    before = (known.before or known.seen) if jump.is_restart else known.before
    return Memory(now, before, now if is_held else known.held, jump), jump


def is_doubtful(known: Memory, now: Instant) -> bool:
    """Whether the time since an earlier boot is unknown. A clock that was corrected is believed."""
    return known.before is not None and not _is_likely(known.before, now)


def is_held(known: Memory, by: Reading, notice_s: float) -> bool:
    return known.held is not None and by.now.boot_s < held_until_s(known.held, by, notice_s)


def held_until_s(since: Instant, by: Reading, notice_s: float) -> float:
    """By the clock of this boot."""
    return due_s(since, max(notice_s, DAY_S), by)


def released(known: Memory) -> Memory:
    """There was time enough to set the clock: it is believed."""
    return replace(known, before=None, held=None)


def recent_jump(known: Memory, now: Instant) -> Jump | None:
    return known.jump if known.jump is not None and elapsed_s(known.jump.at, now) < DAY_S else None


def _jump(known: Memory, now: Instant) -> Jump | None:
    seen = known.seen
    if seen.boot_id == now.boot_id:
        by_s = now.offset_s - seen.offset_s
        is_set = abs(by_s) > _SLACK_S + _SLEW * max(0.0, now.boot_s - seen.boot_s)
        return Jump(now, by_s) if is_set else None
    last = known.before or seen
    return None if _is_likely(last, now) else Jump(now, now.wall_s - last.wall_s, is_restart=True)


def _is_likely(last: Instant, now: Instant) -> bool:
    return -_BACK_S <= now.wall_s - last.wall_s <= _AWAY_S + now.boot_s
