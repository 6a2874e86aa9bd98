"""Slows a lab node down without control groups: its processes run for a part of each period and are stopped for the
rest. It does not limit cores: each process of a node at half speed runs half of the time.

The node program and its forks for watching and probing are never stopped, so a slow node still answers. The throttle
ends with the node program and leaves no process stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from ugro.lab.enter import MARK

# --- processes --------------------------------------------------------------------------------------------------------
# Finds the processes of a lab by the mark in their environment, and ends them.


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


# --- throttle ---------------------------------------------------------------------------------------------------------


PERIOD_S = 0.1
_OWN_NAME = b"ugro.lab.throttle"


def main(home: str, speed: float, program: int) -> None:
    signal.signal(signal.SIGTERM, lambda signum, stack: sys.exit(0))
    work = Work(home, program)
    try:
        _alternate(work, speed)
    finally:
        _signal(work.pids(), signal.SIGCONT)


class Work:
    """The processes of a node except the node program and its forks, which have the same command line."""

    def __init__(self, home: str, program: int) -> None:
        self.program = program
        self._home = home
        # Reading the environment of every process in every period would cost too much.
        self._is_work: dict[int, bool] = {}
        self._unreadable: set[int] = set()

    def pids(self) -> list[int]:
        present = set(pids())
        self._is_work = {pid: known for pid, known in self._is_work.items() if pid in present}
        unreadable_before, self._unreadable = self._unreadable, set()
        command_line = read(self.program, "cmdline")
        for pid in present - self._is_work.keys():
            environment = read(pid, "environ")
            if not environment and pid not in unreadable_before:
                self._unreadable.add(pid)  # perhaps in the middle of an exec: check once more
            elif home_of(environment) != self._home:
                self._is_work[pid] = False
            elif not self._is_machinery(pid, command_line):
                self._is_work[pid] = True
            # else: a fork of the node program may be about to exec, so check it again.
        return [pid for pid, is_work in self._is_work.items() if is_work]

    def _is_machinery(self, pid: int, command_line: bytes) -> bool:
        own = read(pid, "cmdline")
        return pid == self.program or own == command_line or _OWN_NAME in own


def _alternate(work: Work, speed: float) -> None:
    begin = time.monotonic()
    while os.getppid() == work.program:
        _sleep_until(begin + PERIOD_S * speed)
        stopped = work.pids()
        _signal(stopped, signal.SIGSTOP)
        _sleep_until(begin + PERIOD_S)
        _signal(stopped, signal.SIGCONT)
        # If this process was delayed, it skips the lost periods.
        begin = max(begin + PERIOD_S, time.monotonic() - PERIOD_S)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _signal(targets: Iterable[int], number: signal.Signals) -> None:
    for pid in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
