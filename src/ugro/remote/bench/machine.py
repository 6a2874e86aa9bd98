"""CPU, memory and storage, with nothing but the standard library."""

from __future__ import annotations

import ctypes
import os
import random
import zlib
from typing import Any, Callable, Dict, List

from ugro.remote.bench.meter import rate, rate_of_threads, say, skip
from ugro.remote.bench.storage import storage

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
