"""The disk with UGRO's folder: writes with fsync, reads past the page cache.

The file has no name from the moment it is made: whatever ends this process, the file is gone with it.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import tempfile
import time
from typing import Dict, Optional, Tuple

from ugro.remote import disk
from ugro.remote.bench.meter import rate, say, skip, times
from ugro.remote.checks.system import filesystem_of

LEFT_FREE = 1 << 30  # that is still free with the file there
_CHUNK = 8 << 20
_READ = 1 << 20
_SMALL = 4096
_IN_MEMORY = ("tmpfs", "ramfs")


def storage(root: str, seconds: float, size: int) -> None:
    shortage = disk.shortage(root, size, "the test", LEFT_FREE)
    if shortage is not None:
        skip("storage", shortage)
        return
    fd = _nameless(root)
    try:
        written, write = _write(fd, size, 0.45 * seconds)
        fsync_s = _sync_small(fd, 0.1 * seconds)
        found = {"write_bytes_per_s": write, "fsync_s": fsync_s}
        say(storage=found)
        direct = _direct(fd)
        is_cached = direct is None or filesystem_of(os.path.realpath(root)) in _IN_MEMORY
        reads = _read(fd if direct is None else direct, written, 0.45 * seconds)
        say(storage={**found, **reads, "is_cached": is_cached})
        if direct is not None:
            os.close(direct)
    finally:
        os.close(fd)


def _nameless(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system can
        fd, path = tempfile.mkstemp(prefix=".ugro-bench-", dir=folder)
        os.unlink(path)
        return fd


def _write(fd: int, size: int, seconds: float) -> Tuple[int, float]:
    """How much, and how fast. What no file system can compress."""
    block = os.urandom(min(size, _CHUNK))
    begun = time.perf_counter()
    written = 0
    while written < size:
        written += os.write(fd, block)
        os.fdatasync(fd)
        if time.perf_counter() - begun >= seconds:
            break
    return written, written / (time.perf_counter() - begun)


def _sync_small(fd: int, seconds: float) -> float:
    block = os.urandom(_SMALL)

    def step() -> None:
        os.pwrite(fd, block, 0)
        os.fdatasync(fd)

    return statistics.median(times(step, seconds))


def _direct(fd: int) -> Optional[int]:
    """The same file, read past the page cache; None where that cannot be done."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return os.open("/proc/self/fd/%d" % fd, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _read(fd: int, size: int, seconds: float) -> Dict[str, float]:
    # Direct reads need memory that begins at a page.
    with mmap.mmap(-1, _READ) as pages, memoryview(pages) as large, large[:_SMALL] as small:
        place = [0]
        last = max(1, size // _SMALL - 1)

        def one_after_another() -> int:
            place[0] = place[0] + _READ if place[0] + 2 * _READ <= size else 0
            return os.preadv(fd, [large], place[0])

        def anywhere() -> int:
            os.preadv(fd, [small], random.randrange(last) * _SMALL)
            return 1

        return {
            "read_bytes_per_s": rate(one_after_another, seconds / 2),
            "random_reads_per_s": rate(anywhere, seconds / 2),
        }
