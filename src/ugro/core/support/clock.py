"""The time on this machine, by both clocks. Everything that decides gets it as an argument."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from ugro.core.support.moment import Instant


def now() -> Instant:
    return Instant(time.time(), boot_id(), boot_clock_s())


def boot_clock_s() -> float:
    """Also runs while this machine sleeps, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
