"""The fence of a job on this node: which attempts may still start here.

All jobs with a number share one file, with a fixed slot for each: a new file for every job would cost more than
everything else that a small run needs, and would stay for good.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from typing import Iterator

from ugro.node import durable
from ugro.node.durable import Numbers
from ugro.node.program import Refused

_FENCE_S = 10.0
_PAUSE_S = 0.005
_MOST_NUMBERED = 10**8
_SLOT_BYTES = 128  # never across a disk's sectors, so that a power cut leaves each whole
_FLOCK = struct.Struct("hhqqi4x")


def replaced(generation: int, newest: int) -> Refused:
    """To an agent that has a successor."""
    text = "this agent's state is of generation %d, and the node has met %d: it was copied or restored"
    return Refused("fenced-agent", text % (generation, newest))


class Fence:
    """The highest attempt that came here, and the highest that may never start here any more.

    A change need not be durable while nothing depends on it: the process that starts ranks, or gives up a claim,
    makes it durable first.
    """

    def __init__(self, folder: str, job: str) -> None:
        is_numbered = job.isdecimal() and job[0] != "0" and int(job) < _MOST_NUMBERED
        self._slot = int(job) * _SLOT_BYTES if is_numbered else 0
        self.path = folder + "/.numbered" if is_numbered else "%s/%s" % (folder, job)
        self.numbers = Numbers(self.path, 2, self._slot)

    @contextlib.contextmanager
    def held(self, timeout_s: float = _FENCE_S) -> Iterator[HeldFence]:
        """Only one process at a time decides about a job; ``busy`` when another one holds it for too long."""
        deadline = time.monotonic() + timeout_s
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._take(fd):
                if time.monotonic() >= deadline:
                    raise Refused("busy", "%s is held by another process for more than %g s" % (self.path, timeout_s))
                time.sleep(_PAUSE_S)
            yield HeldFence(self.numbers, fd)
        finally:
            os.close(fd)

    def _take(self, fd: int) -> bool:
        """True: it is ours until the descriptor is closed. False: another process has it."""
        # Not the process's own, as other locks of a range are: those go with any descriptor of the file.
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._slot, _SLOT_BYTES, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def seen(self) -> int:
        return self.numbers.read()[0]

    def is_closed_to(self, attempt: int) -> bool:
        return attempt <= self.numbers.read()[1]


class HeldFence:
    def __init__(self, numbers: Numbers, fd: int) -> None:
        self._numbers = numbers
        self._fd = fd
        self.seen, self.closed = numbers.read_from(fd)

    def enter(self, attempt: int) -> None:
        """From now on no older attempt starts here."""
        if attempt < self.seen or attempt <= self.closed:
            text = "attempt %d may not start here: attempt %d came, and up to %d all are over"
            raise Refused("fenced", text % (attempt, self.seen, self.closed))
        if attempt > self.seen:
            self._write(attempt, self.closed)

    def close(self, attempt: int, *, is_durable: bool = True) -> None:
        """From now on neither this attempt nor an older one starts here."""
        if attempt > self.closed:
            self._write(max(self.seen, attempt), attempt)
            if is_durable:
                durable.sync_file(self._numbers.path)
                durable.sync_folder(os.path.dirname(self._numbers.path))

    def _write(self, seen: int, closed: int) -> None:
        self._numbers.write_to(self._fd, seen, closed)
        self.seen, self.closed = seen, closed
