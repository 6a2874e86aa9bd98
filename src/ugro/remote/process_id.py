"""The name of a process, for files that outlive it: its pid, when it started, and its machine.

The machine belongs to it because some have one folder on a file server: there the same pid may be somebody else's.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ugro.remote.identity import machine_id
from ugro.remote.process.terminate import Processes, is_running, start_time


class ProcessName(NamedTuple):
    pid: int
    started: int
    machine: str

    @classmethod
    def own(cls) -> ProcessName:
        pid = os.getpid()
        return cls(pid, start_time(pid) or 0, machine_id())

    @classmethod
    def parse(cls, text: str) -> ProcessName:
        pid, started, machine = text.split("-", 2)
        return cls(int(pid), int(started), machine)

    def __str__(self) -> str:
        return "%d-%d-%s" % self

    def processes(self) -> Processes:
        """Itself, if it is one of this machine; it may be gone."""
        return {self.pid: self.started} if self.machine == machine_id() else {}

    def is_alive(self) -> bool:
        return any(is_running(pid, started) for pid, started in self.processes().items())

    def is_orphaned(self) -> bool:
        """It was here, and is gone."""
        return self.machine == machine_id() and not self.is_alive()
