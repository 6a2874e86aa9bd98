"""CPU, memory and storage, with nothing but the standard library."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import tempfile
import time
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

from ugro.features.hardware.node.meter import rate, rate_of_threads, say, skip, times
from ugro.node import machine as disk
from ugro.node.system import filesystem_of

# --- storage ----------------------------------------------------------------------------------------------------------
# The disk with UGRO's folder: writes with fsync, reads past the page cache.
#
# The file has no name from the moment it is made: whatever ends this process, the file is gone with it.


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


# --- machine ----------------------------------------------------------------------------------------------------------


_SHARES = {"cpu": 0.3, "memory": 0.15, "storage": 0.55}
_BLOCK = 256 << 10
_MOST_BUFFER = 64 << 20  # far above any cache
_LEAST_BUFFER = 4 << 20
_MOST_THREADS = 16
_FREE_SHARE = 10  # buffers take at most this part of the memory that is free


def machine(params: Dict[str, Any]) -> None:
    for part in [part for part in _SHARES if part in params["parts"]]:
        seconds = float(params["seconds"]) * _SHARES[part]
        say(phase=part)
        if part == "cpu":
            say(cpu=cpu(seconds))
        elif part == "memory":
            memory(seconds)
        else:
            storage(str(params["root"]), seconds, int(params["storage_bytes"]))


def cpu(seconds: float) -> Dict[str, Any]:
    """Compresses text: branches, tables and caches, as much of what a data loader does."""
    text = _text()
    cores = _cores()

    def step() -> int:
        zlib.compress(text, 6)  # lets go of the interpreter's lock
        return len(text)

    step()
    return {
        "one_core_bytes_per_s": rate(step, 0.4 * seconds),
        "all_cores_bytes_per_s": rate_of_threads([step] * cores, 0.6 * seconds),
        "cores": cores,
    }


def memory(seconds: float) -> None:
    threads = min(_cores(), _MOST_THREADS)
    size = min(_MOST_BUFFER, _available_bytes() // _FREE_SHARE // threads // 2)
    if size < _LEAST_BUFFER:
        skip("memory", "too little memory is free")
        return
    # A copy reads and writes: both count.
    say(memory_bytes_per_s=rate_of_threads([_copier(size) for _ in range(threads)], seconds))


def _copier(size: int) -> Callable[[], int]:
    source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    # Written once, so that they are pages of their own and not all the one of zeros.
    ctypes.memset(source, 1, size)
    ctypes.memset(target, 2, size)

    def step() -> int:
        ctypes.memmove(target, source, size)  # lets go of the interpreter's lock
        return 2 * size

    return step


def _text() -> bytes:
    """The same everywhere, or figures of nodes could not be compared."""
    source = random.Random(1)
    words: List[bytes] = [bytes(source.choices(range(97, 123), k=source.randint(2, 9))) for _ in range(2000)]
    text = bytearray()
    while len(text) < _BLOCK:
        text += source.choice(words) + b" "
    return bytes(text[:_BLOCK])


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
