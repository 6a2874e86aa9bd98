"""Times. The wall clock is for people: somebody may set it. Durations come from the clock of a boot, which runs on.

A stored time has both: RFC 3339 to be shown, and beside it the boot and its clock, as ``8f3c… 1234.567``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

# After a restart of the machine its clock may still be wrong for a while: nothing is over by the wall clock before.
PATIENCE_S = 300.0
_SET_S = 2.0  # a wall clock that differs by more was set


@dataclass(frozen=True, slots=True)
class Instant:
    wall_s: float
    boot_id: str = ""  # empty: not known
    boot_s: float = 0.0

    @property
    def at(self) -> str:
        return datetime.fromtimestamp(self.wall_s, UTC).isoformat(timespec="milliseconds")

    @property
    def boot(self) -> str:
        return f"{self.boot_id} {self.boot_s:.3f}"

    @property
    def offset_s(self) -> float:
        """Stays the same within a boot, unless the wall clock is set."""
        return self.wall_s - self.boot_s


@dataclass(frozen=True, slots=True)
class Reading:
    """What an agent knows about the time."""

    now: Instant
    started: Instant  # when the agent started
    is_doubtful: bool = False  # since the last boot, the wall clock moved back or by months


def unix_seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def instant_of(at: str, boot: str | None) -> Instant:
    return instant_at(unix_seconds(at), boot)


def instant_at(wall_s: float, boot: str | None) -> Instant:
    boot_id, _, boot_s = (boot or "").partition(" ")
    try:
        return Instant(wall_s, boot_id, float(boot_s))
    except ValueError:
        return Instant(wall_s)


def elapsed_s(since: Instant, until: Instant) -> float:
    """Between boots only the wall clock can tell."""
    if since.boot_id and since.boot_id == until.boot_id:
        return max(0.0, until.boot_s - since.boot_s)
    return max(0.0, until.wall_s - since.wall_s)


def shown_s(at: Instant, now: Instant) -> float:
    """When it was, by the wall clock as it goes now: of a job that began a minute ago nobody is told two hours."""
    wall_s = now.wall_s - elapsed_s(at, now)
    return wall_s if at.boot_id == now.boot_id and abs(wall_s - at.wall_s) > _SET_S else at.wall_s


def due_s(since: Instant, duration_s: float, by: Reading) -> float:
    """When a duration is over, by the clock of this boot.

    One that began in an earlier boot is over by the wall clock, but neither at once nor never: what began before this
    agent started has lasted at least as long as the agent.
    """
    if since.boot_id and since.boot_id == by.now.boot_id:
        return since.boot_s + duration_s
    latest_s = by.started.boot_s + duration_s
    if by.is_doubtful:
        return latest_s
    by_wall_s = by.now.boot_s + duration_s - (by.now.wall_s - since.wall_s)
    return min(latest_s, max(by_wall_s, by.started.boot_s + min(duration_s, PATIENCE_S)))


def place_s(at: Instant, by: Reading) -> float:
    """When it was, by the clock of this boot; the same at every call, also after the wall clock was set."""
    return at.boot_s if at.boot_id == by.started.boot_id else by.started.boot_s - elapsed_s(at, by.started)


# --- the time on this machine -----------------------------------------------------------------------------------------
# It is read from both clocks. Everything that decides gets it as an argument.


def now() -> Instant:
    return Instant(time.time(), boot_id(), boot_clock_s())


def boot_clock_s() -> float:
    """Also runs while this machine sleeps, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# --- pauses between tries ---------------------------------------------------------------------------------------------
# They grow. This does not count tries and does not wait: the caller does.


# Far past any cap, and small enough that the power never overflows a float.
_MOST_DOUBLINGS = 60
_DENIED_S = 60.0
_LONGEST_DENIED_S = 3600.0


def delay_s(attempt: int, random_ratio: float, *, base_s: float = 0.5, cap_s: float = 30.0) -> float:
    """The wait after failure number ``attempt``, counted from 1; ``random_ratio`` is drawn from 0..1.

    It lies between half and the whole of the doubled delay: nodes that failed together are not all tried
    again in the same moment, and none at once.
    """
    doublings = min(max(attempt - 1, 0), _MOST_DOUBLINGS)
    whole_s = min(cap_s, base_s * 2.0**doublings)
    return whole_s * (1 + random_ratio) / 2


def denied_pause_s(denials: int, random_ratio: float) -> float:
    """How long a person's login is left alone after it was denied so many times in a row.

    There may be one for each person on a node, and servers ban an address for the failures of all of them.
    """
    doublings = min(max(denials - 1, 0), _MOST_DOUBLINGS)
    return min(_LONGEST_DENIED_S, _DENIED_S * 2.0**doublings) * (1 + random_ratio / 5)
