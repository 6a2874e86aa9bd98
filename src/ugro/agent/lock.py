"""One agent per state directory: a lock that the kernel holds as long as this process lives."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time

import ugro
from ugro.core.support.state_dir import StateDir
from ugro.remote import inotify

log = logging.getLogger(__name__)

_WAIT_S = 0.2
_LOOK_S = 1.0
_GONE = inotify.DELETE | inotify.DELETE_SELF | inotify.MOVED_FROM | inotify.MOVE_SELF


class HomeLock:
    """After a crash there is nothing to clean up."""

    def __init__(self, home: StateDir, descriptor: int) -> None:
        self.home = home
        self._descriptor = descriptor

    @classmethod
    def take(cls, home: StateDir) -> HomeLock | None:
        """None: another process has it."""
        descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _WAIT_S
        while not _is_taken_up(descriptor):
            # A client that checks for a running agent holds the lock for a moment.
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "version": ugro.__version__}).encode())
        return cls(home, descriptor)

    def is_lost(self) -> bool:
        """Whether the file is gone or another: then this directory is another agent's, or nobody's."""
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self.home.lock)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that does not answer now says nothing
            return False
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    async def end_when_lost(self) -> None:
        """Ends this process at once if its directory was removed or replaced: its files are another agent's then.

        The kernel reports it in time for most writes; looking now and then finds what it does not report.
        """
        with contextlib.suppress(OSError):  # the kernel has no more watches to give
            watch = inotify.Inotify()
            watch.add(str(self.home.path), _GONE)
            asyncio.get_running_loop().add_reader(watch.fd, self.look, watch)
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self, watch: inotify.Inotify | None = None) -> None:
        """Ends this process if its directory was removed or replaced. Any thread may look."""
        for _ in watch.read() if watch is not None else ():
            pass
        if self.is_lost():
            log.error("%s was removed or replaced: this agent ends; jobs on the nodes keep running", self.home.path)
            os._exit(1)  # nothing is closed: that would write to the paths of another agent


def _is_taken_up(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
