"""Moments on this machine: a boot and a clock that nobody can set."""

from __future__ import annotations

import functools
import time
from typing import Any, Dict, Optional


@functools.lru_cache(maxsize=None)
def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def clock_s() -> float:
    """Goes on while the machine sleeps, and is no one's to set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def moment() -> Dict[str, Any]:
    """Sent with every answer; an agent gives the latest one back as ``as_of`` to say how old its word is."""
    return {"boot_id": boot_id(), "clock_s": round(clock_s(), 3)}


def wall_s(boot: object, then_s: float, wall_then_s: float) -> float:
    """When that was by the wall clock: as it said then or as it goes now, the earlier. It may have been set meanwhile.

    What was stamped since then is never older than this.
    """
    if boot != boot_id():
        return wall_then_s
    return min(wall_then_s, time.time() - max(0.0, clock_s() - then_s))


def age_s(as_of: Optional[Dict[str, Any]]) -> float:
    """How long ago that moment was; endless when it was before a restart of this machine."""
    if as_of is None:
        return 0.0
    if as_of["boot_id"] != boot_id():
        return float("inf")
    return max(0.0, clock_s() - float(as_of["clock_s"]))
