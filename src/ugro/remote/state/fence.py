"""The fence of a job on this node: which attempts may still start here.

Jobs with a number share one file, a place for each: a new file for every job costs more than all else that a small run
needs, and would be there for good.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from typing import Iterator

from ugro.remote.durable import Numbers
from ugro.remote.program import Refused

_FENCE_S = 10.0
_PAUSE_S = 0.005
_MOST_NUMBERED = 10**8
_PLACE_BYTES = 128  # never across a disk's sectors, so that a power cut leaves each whole
_FLOCK = struct.Struct("hhqqi4x")


class Fence:
    """The highest attempt that came here, and the highest that may never start here any more.

    What is written here need not last by itself while nothing depends on it: whoever starts ranks, or lets go of a
    claim, sees to it that it does.
    """

    def __init__(self, folder: str, job: str) -> None:
        is_numbered = job.isdecimal() and job[0] != "0" and int(job) < _MOST_NUMBERED
        self._place = int(job) * _PLACE_BYTES if is_numbered else 0
        self.path = folder + "/.numbered" if is_numbered else "%s/%s" % (folder, job)
        self.numbers = Numbers(self.path, 2, self._place)

    def open(self) -> int:
        """A descriptor to hold it by."""
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, fd: int) -> bool:
        """True: it is ours until the descriptor is closed. False: somebody else has it."""
        # Not the process's own, as other locks of a range are: those go with any descriptor of the file.
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._place, _PLACE_BYTES, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):
            return False
        return True

    @contextlib.contextmanager
    def held(self, timeout_s: float = _FENCE_S) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        fd = self.open()
        try:
            while not self.take(fd):
                if time.monotonic() >= deadline:
                    raise Refused("busy", "%s is held by another process for more than %g s" % (self.path, timeout_s))
                time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(fd)

    def seen(self) -> int:
        return self.numbers.read()[0]

    def allows(self, attempt: int) -> bool:
        seen, closed = self.numbers.read()
        return attempt >= seen and attempt > closed

    def is_closed_to(self, attempt: int) -> bool:
        return attempt <= self.numbers.read()[1]

    def enter(self, attempt: int) -> None:
        """Held by the caller. From now on no older attempt starts here."""
        seen, closed = self.numbers.read()
        if attempt < seen or attempt <= closed:
            text = "attempt %d may not start here: attempt %d came, and up to %d all are over"
            raise Refused("fenced", text % (attempt, seen, closed))
        if attempt > seen:
            self.numbers.write(attempt, closed, is_lasting=False)

    def close(self, attempt: int, *, is_lasting: bool = True) -> None:
        """Held by the caller. From now on neither this attempt nor an older one starts here."""
        seen, closed = self.numbers.read()
        if attempt > closed:
            self.numbers.write(max(seen, attempt), attempt, is_lasting=is_lasting)
