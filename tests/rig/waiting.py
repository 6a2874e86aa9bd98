"""Waiting for conditions instead of sleeping, and finding and ending processes by ``/proc``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_END_TIMEOUT_S = 10
# A deadline is there for what hangs. A machine that others use at the same time may be that much slower.
_PATIENCE = 3


def wait_until(predicate: Callable[[], T], timeout_s: float = 10, what: str = "the condition") -> T:
    """The first true value of ``predicate``; fails with the last value seen after ``timeout_s`` on a slow machine."""
    timeout_s *= _PATIENCE
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}; last seen: {value!r}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
    return value


def processes_with(marker: bytes) -> list[int]:
    """Processes, other than this one, whose starting environment or command line contains ``marker``."""
    return [
        pid
        for pid in _pids()
        if pid != os.getpid() and (marker in _read(pid, "environ") or marker in _read(pid, "cmdline"))
    ]


def processes_with_variable(name: str, values: Collection[str]) -> list[int]:
    """Processes that were started with the environment variable ``name`` set to one of ``values``."""
    wanted = {os.fsencode(f"{name}={value}") for value in values}
    return [pid for pid in _pids() if not wanted.isdisjoint(_read(pid, "environ").split(b"\0"))]


def descendants(roots: Iterable[int]) -> list[int]:
    """All living processes below ``roots``, parents first, without the roots and without zombies."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for pid in _pids():
        state, parent = _state_and_parent(pid)
        children.setdefault(parent, []).append(pid)
        if state in "ZX":
            zombies.add(pid)
    found: list[int] = []
    level = list(roots)
    while level:
        level = [child for pid in level for child in children.pop(pid, ())]
        found += level
    return [pid for pid in found if pid not in zombies]


def is_alive(pid: int) -> bool:
    """Whether the process still runs or could run again; a zombie does not."""
    return _state_and_parent(pid)[0] not in "ZX"


def parent_of(pid: int) -> int:
    return _state_and_parent(pid)[1]


def name_of(pid: int) -> str:
    return _read(pid, "comm").decode(errors="replace").strip()


def signal_all(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stop_trees(roots: Sequence[int]) -> list[int]:
    """SIGSTOP for all processes from ``roots`` down; returns them."""
    stopped: list[int] = []
    # A child forked while we looked is found by the next look; a parent that stands still has no more.
    for _ in range(20):
        fresh = [pid for pid in (*roots, *descendants(roots)) if pid not in stopped]
        if not fresh:
            break
        signal_all(signal.SIGSTOP, fresh)
        stopped += fresh
    return stopped


def end_all_with_variable(name: str, values: Collection[str]) -> None:
    """Kills what was started with one of these values, and all below it, until two looks find nothing."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    quiet_looks = 0
    while quiet_looks < 2:
        found = processes_with_variable(name, values)
        quiet_looks = 0 if found else quiet_looks + 1
        if time.monotonic() > deadline:
            raise AssertionError(f"processes that do not end: {found}")
        doomed = stop_trees(found)
        signal_all(signal.SIGKILL, doomed)
        wait_until_dead(doomed)


def wait_until_dead(pids: Collection[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), _END_TIMEOUT_S, f"processes {pids} to end")


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _state_and_parent(pid: int) -> tuple[str, int]:
    # The name, in brackets, may itself hold blanks and brackets.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1])) if fields else ("X", 0)


def _read(pid: int, file: str) -> bytes:
    # Processes end while we look, and those of other users may not be looked into.
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
