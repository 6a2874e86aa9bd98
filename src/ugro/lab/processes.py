"""Finds the processes of a lab by the mark in their environment, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from ugro.lab.enter import MARK

_GRACE_S = 1.0
_LIMIT_S = 10.0
# Longer than an entering process takes from checking the lab to setting its mark.
_BETWEEN_LOOKS_S = 0.1


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def home_of(environment: bytes) -> str | None:
    """The home of the lab node that a process with this environment belongs to, if any."""
    mark = f"{MARK}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(mark):
            return os.fsdecode(entry.removeprefix(mark))
    return None


def read(pid: int, file: str) -> bytes:
    """Empty for a process that has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def of_lab(lab: Path) -> dict[int, str]:
    """pid → home of its node, for every live process of the lab."""
    inside = f"{lab}{os.sep}"
    homes = {pid: home_of(read(pid, "environ")) for pid in pids()}
    return {pid: home for pid, home in homes.items() if home is not None and home.startswith(inside)}


def end(find: Callable[[], Collection[int]], *, grace_s: float = _GRACE_S, limit_s: float = _LIMIT_S) -> list[int]:
    """SIGTERM, a short wait, SIGKILL, until two scans find nothing. Returns the processes that did not end."""
    started = time.monotonic()
    asked: set[int] = set()
    quiet_looks = 0
    while True:
        found = [pid for pid in find() if pid != os.getpid()]
        elapsed_s = time.monotonic() - started
        quiet_looks = 0 if found else quiet_looks + 1
        if quiet_looks == 2:
            return []
        if elapsed_s > limit_s:
            return found
        for pid in found:
            _end(pid, asked, is_over=elapsed_s > grace_s)
        time.sleep(_BETWEEN_LOOKS_S)


def _end(pid: int, asked: set[int], *, is_over: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if is_over:
            os.kill(pid, signal.SIGKILL)
        elif pid not in asked:
            asked.add(pid)
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
