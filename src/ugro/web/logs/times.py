"""When the bytes of a log were collected, and which are missing, from a few lines of its index.

The index (``agent.artifacts.log_index``) has up to a line for each second of a run. It is searched on disk, so a page
of a log costs the same after a minute and after a month.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from ugro.agent.artifacts.log_index import index_path, written_at

_BLOCK = 16 * 1024
_BEFORE = 512  # bytes: the lines just before have the gap and the time that still apply
_LONGEST_LINE = 128


@dataclass(frozen=True, slots=True)
class Gap:
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LogTimes:
    """What the index says about one section of a log."""

    offsets: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    gaps: tuple[Gap, ...] = ()

    def at(self, offset: int) -> float | None:
        """Seconds since the epoch."""
        index = bisect_right(self.offsets, offset)
        return self.seconds[index - 1] if index else None

    def gap_at(self, offset: int) -> Gap | None:
        return next((gap for gap in self.gaps if gap.begin <= offset < gap.end), None)

    def gap_after(self, offset: int) -> Gap | None:
        """The first gap that begins later."""
        return min((gap for gap in self.gaps if gap.begin > offset), key=lambda gap: gap.begin, default=None)

    def gap_before(self, offset: int) -> Gap | None:
        """The last gap that begins earlier, even if it ends later."""
        return max((gap for gap in self.gaps if gap.begin < offset), key=lambda gap: gap.begin, default=None)


def times_between(log: Path, begin: int, end: int) -> LogTimes:
    with _opened(log) as file:
        if file is None:
            collected_at = written_at(log)
            return LogTimes((0,), (collected_at,)) if collected_at is not None else LogTimes()
        file.seek(max(0, _search(file, 2, begin) - _BEFORE))
        if file.tell():
            file.readline()
        return _collected(file, end)


def offset_at(log: Path, seconds: float) -> int:
    """The start of the last bytes that were collected by that time."""
    with _opened(log) as file:
        if file is None:
            return 0
        file.seek(_search(file, 1, seconds))
        times = (words for words in _entries(file) if words[0] == b"time")
        found = list(takewhile(lambda words: float(words[1]) <= seconds, times))
        return int(found[-1][2]) if found else 0


@contextmanager
def _opened(log: Path) -> Iterator[BinaryIO | None]:
    try:
        file = index_path(log).open("rb", buffering=_BLOCK)
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def _search(file: BinaryIO, word: int, wanted: float) -> int:
    """The start of the last line whose time (word 1) or offset (word 2) is not larger; both only grow."""
    low, high = 0, os.fstat(file.fileno()).st_size
    while high - low > _LONGEST_LINE:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        begin, found = file.tell(), _next_time(file)
        if begin >= high or found is None or float(found[word]) > wanted:
            high = middle
        else:
            low = begin
    return low


def _next_time(file: BinaryIO) -> list[bytes] | None:
    return next((words for words in _entries(file) if words[0] == b"time"), None)


def _entries(file: BinaryIO) -> Iterator[list[bytes]]:
    for line in file:
        words = line.split()
        if line.endswith(b"\n") and len(words) == 3:  # the last line may be half written
            yield words


def _collected(file: BinaryIO, end: int) -> LogTimes:
    offsets: list[int] = []
    seconds: list[float] = []
    gaps: dict[int, int] = {}
    for kind, first, second in _entries(file):
        if (int(second) if kind == b"time" else int(first)) >= end:
            break
        if kind == b"time":
            offsets.append(int(second))
            seconds.append(max(float(first), seconds[-1] if seconds else 0.0))  # a clock that was set back
        else:
            gaps[int(first)] = int(second)
    return LogTimes(tuple(offsets), tuple(seconds), tuple(Gap(*gap) for gap in gaps.items()))
