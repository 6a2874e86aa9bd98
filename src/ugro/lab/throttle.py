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
from collections.abc import Iterable

from ugro.lab.processes import home_of, pids, read

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
