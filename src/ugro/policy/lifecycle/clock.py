"""Whether this machine's wall clock can be believed, and what is done while it cannot.

Within a boot, the wall clock and the clock of the boot advance together: if they do not, the wall clock was set.
Durations do not depend on it. Ages do: while a clock may be wrong by months, nothing is removed because it is old.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ugro.core.support.moment import Instant, Reading, due_s, elapsed_s
from ugro.core.support.quantity import format_duration

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
