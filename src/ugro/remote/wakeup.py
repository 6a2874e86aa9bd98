"""Signals as something to wait for: a descriptor that can be read when one came."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from typing import Callable, Optional


def listen(on_term: Callable[[], None]) -> int:
    """For processes that look after ranks: the end of a child wakes them, and only SIGTERM means anything."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    wake, wake_write = os.pipe()
    for fd in (wake, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # Handled and not ignored: what is ignored here would be ignored by the ranks, too.
    for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, lambda number, stack: None)
    signal.signal(signal.SIGTERM, lambda number, stack: on_term())
    return wake


def drain(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def is_readable(fd: int, timeout_s: Optional[float]) -> bool:
    """Waits for it, without an end if the time is None. ``select.select`` would take no descriptor above 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


def open_control(path: str) -> int:
    """A pipe with a name, for orders."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    # For writing, too: it then never comes to an end while nobody else has it open.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
