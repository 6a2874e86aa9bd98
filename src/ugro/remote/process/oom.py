"""Was it the kernel that killed a process for want of memory? It says so nowhere directly; it counts."""

from __future__ import annotations

import contextlib
import os
import time
from typing import List, NamedTuple, Tuple

_SAMPLE_EVERY_S = 5.0
# A large process takes a while from its death sentence to its end.
_WINDOW_S = 30.0


class _Look(NamedTuple):
    at_s: float
    files: List[str]
    counts: List[int]


_latest: List[_Look] = []


def look() -> _Look:
    """What the counters say, at most so old as the time between two samples. A forked process takes it over."""
    now = time.monotonic()
    if not _latest or now - _latest[0].at_s >= _SAMPLE_EVERY_S:
        files = _counters()
        _latest[:] = [_Look(now, files, [_value(path) for path in files])]
    return _latest[0]


class OomCounter:
    """How many processes the kernel killed lately: on the whole machine, and in our own control group."""

    def __init__(self) -> None:
        first = look()
        self._files = first.files
        self._samples: List[Tuple[float, List[int]]] = [(first.at_s, first.counts)]

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            while len(self._samples) > 1 and self._samples[1][0] < now - _WINDOW_S:
                self._samples.pop(0)
            self._samples.append((now, self._counts()))

    def recent(self) -> int:
        before = self._samples[0][1]
        return max((now - before[place] for place, now in enumerate(self._counts())), default=0)

    def _counts(self) -> List[int]:
        return [_value(path) for path in self._files]


def _counters() -> List[str]:
    files = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as cgroups:
        for line in cgroups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append("/sys/fs/cgroup%s/memory.events" % path)
            elif "memory" in controllers.split(","):
                files.append("/sys/fs/cgroup/memory%s/memory.oom_control" % path)
    return [path for path in files if os.access(path, os.R_OK)]


def _value(path: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        _, _, rest = (b"\n" + file.read()).partition(b"\noom_kill ")
        return int(rest.split(None, 1)[0])
    return 0
