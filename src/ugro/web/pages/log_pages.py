"""Pages of a log, from its end or from any position: a page of a gigabyte log costs as much as one of a small log.

A page has whole lines of one rank or of several, in the order in which they were collected. Its cursors, a byte offset
for each rank, locate the previous and the next page; pages neither lose nor repeat lines. These functions block.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from ugro.kernel.files.results.log_mirror import index_path, line_begin, written_at

# --- times ------------------------------------------------------------------------------------------------------------
# When the bytes of a log were collected, and which are missing, from a few lines of its index.
#
# The index (see ``kernel/files/results/log_mirror.py``) has up to a line for each second of a run. It is searched on
# disk, so a page of a log costs the same after a minute and after a month.


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


# --- pages ------------------------------------------------------------------------------------------------------------


PAGE_BYTES = 96 * 1024
_LEAST_BYTES = 4 * 1024  # per rank, if there are many
_MOST_LINES = 2000
_LEAST_LINES = 50
_PAGES_LONGEST_LINE = 8 * 1024
_LONG_AGO = 0.0

Logs = Mapping[int, Path]  # by rank
Cursor = Mapping[int, int]  # by rank, a byte offset


@dataclass(frozen=True, slots=True)
class Line:
    rank: int
    offset: int
    at: float | None  # seconds since the epoch
    text: str
    is_cut: bool = False  # it continues in the next one
    is_open: bool = False  # it has no newline yet: the next page repeats it, perhaps longer
    dropped_bytes: int = 0  # bytes that the node dropped here

    def to_wire(self) -> list[Any]:
        flag = "cut" if self.is_cut else "open" if self.is_open else self.dropped_bytes
        return [self.rank, self.offset, self.at, self.text, *([flag] if flag else [])]


@dataclass(frozen=True, slots=True)
class Page:
    lines: tuple[Line, ...]
    begin: dict[int, int]
    end: dict[int, int]
    sizes: dict[int, int]

    def to_wire(self) -> dict[str, Any]:
        """A line is ``[rank, offset, seconds, text]``, then ``cut``, ``open``, or the number of dropped bytes."""
        lines = [line.to_wire() for line in self.lines]
        return {"lines": lines, "begin": self.begin, "end": self.end, "sizes": self.sizes}


def sizes_of(logs: Logs) -> dict[int, int]:
    return {rank: _size(path) for rank, path in logs.items()}


def page_before(logs: Logs, before: Cursor | None = None) -> Page:
    """The page that ends at the cursor; without one, the last page, with a line that is still being written."""
    sizes = sizes_of(logs)
    ends = sizes if before is None else {rank: min(size, before.get(rank, size)) for rank, size in sizes.items()}
    share = _Share.among(logs)
    parts = {rank: _backward(_Log(rank, logs[rank], sizes[rank]), ends[rank], share) for rank in logs}
    # If a rank has older lines that were not read, lines of other ranks from before its oldest must wait.
    oldest = [_time(part.lines[0]) for part in parts.values() if part.begin > 0 and part.lines]
    horizon = max(oldest, default=_LONG_AGO)
    chosen = {rank: [line for line in part.lines if _time(line) >= horizon] for rank, part in parts.items()}
    begin = {
        rank: chosen[rank][0].offset if chosen[rank] else (ends[rank] if part.lines else part.begin)
        for rank, part in parts.items()
    }
    return Page(_in_order(chosen), begin, {rank: part.end for rank, part in parts.items()}, sizes)


def page_after(logs: Logs, after: Cursor) -> Page:
    sizes = sizes_of(logs)
    begins = {rank: min(size, after.get(rank, 0)) for rank, size in sizes.items()}
    share = _Share.among(logs)
    parts = {rank: _forward(_Log(rank, logs[rank], sizes[rank]), begins[rank], share) for rank in logs}
    newest = [_time(part.lines[-1]) for rank, part in parts.items() if part.has_more and part.lines]
    horizon = min(newest, default=float("inf"))
    chosen, end = {}, {}
    for rank, part in parts.items():
        chosen[rank] = [line for line in part.lines if _time(line) <= horizon]
        later = part.lines[len(chosen[rank]) :]
        end[rank] = later[0].offset if later else part.end
    return Page(_in_order(chosen), begins, end, sizes)


def cursor_at(logs: Logs, rank: int, offset: int) -> dict[int, int]:
    """The start of the line with that byte, and in the other logs what was collected at the same time."""
    size = _size(logs[rank])
    offset = min(offset, size)
    times = times_between(logs[rank], max(0, offset - _PAGES_LONGEST_LINE), offset + 1)
    gap = times.gap_before(offset + 1)
    least = max(offset - _PAGES_LONGEST_LINE, min(gap.end, offset) if gap else 0, 0)
    cursor = {rank: line_begin(logs[rank], offset, least) if size else 0}
    seconds = times.at(offset)
    for other, path in logs.items():
        if other != rank:
            cursor[other] = min(offset_at(path, seconds), _size(path)) if seconds is not None else 0
    return cursor


# --- one rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Log:
    rank: int
    path: Path
    size: int

    def read(self, begin: int, end: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except FileNotFoundError:
            return b""

    def hole(self, begin: int, end: int, times: LogTimes) -> Line:
        return Line(self.rank, begin, times.at(begin), "", dropped_bytes=end - begin)


@dataclass(frozen=True, slots=True)
class _Share:
    """How much of a page one rank may use."""

    size: int
    lines: int

    @classmethod
    def among(cls, logs: Logs) -> _Share:
        count = max(1, len(logs))
        return cls(max(_LEAST_BYTES, PAGE_BYTES // count), max(_LEAST_LINES, _MOST_LINES // count))


@dataclass(frozen=True, slots=True)
class _Part:
    lines: list[Line]
    begin: int
    end: int
    has_more: bool = False


def _forward(log: _Log, begin: int, share: _Share) -> _Part:
    times = times_between(log.path, begin, begin + share.size)
    lines, start = [], begin
    if (gap := times.gap_at(begin)) is not None:
        lines, start = [log.hole(begin, gap.end, times)], gap.end
        times = times_between(log.path, start, start + share.size)
    following = times.gap_after(start)
    stop = min(start + share.size, log.size, following.begin if following else log.size)
    data = log.read(start, max(start, stop))
    is_last = start + len(data) >= log.size
    kept = data if is_last or (following and stop == following.begin) else data[: _page_end(data)]
    lines += _lines(log.rank, start, kept, times, is_last=is_last)
    end = start + len(kept)
    if len(lines) > share.lines:
        return _Part(lines[: share.lines], begin, lines[share.lines].offset, has_more=True)
    if lines and lines[-1].is_open:
        end = lines[-1].offset
    return _Part(lines, begin, end, has_more=not is_last)


def _backward(log: _Log, before: int, share: _Share) -> _Part:
    begin = max(0, before - share.size)
    times = times_between(log.path, begin, before + 1)
    lines: list[Line] = []
    if (gap := times.gap_before(before)) is not None and gap.end > begin:
        end = min(gap.end, before)
        lines, begin = [log.hole(gap.begin, end, times)], end
    data = log.read(begin, before)
    if begin > 0 and not lines:
        skipped = _to_line_begin(log, begin, data)
        begin, data = begin + skipped, data[skipped:]
    is_last = before >= log.size
    lines += _lines(log.rank, begin, data, times, is_last=is_last)
    end = lines[-1].offset if lines and lines[-1].is_open else begin + len(data)
    lines = lines[-share.lines :]
    return _Part(lines, lines[0].offset if lines else begin, end)


def _page_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1 or _character_end(data)


def _to_line_begin(log: _Log, begin: int, data: bytes) -> int:
    """How many bytes belong to a line that began earlier; 0 if that line is so long that it must be cut."""
    if log.read(begin - 1, begin) == b"\n":
        return 0
    first = data.find(b"\n") + 1
    return first if 0 < first < len(data) else _character_begin(data)


def _lines(rank: int, offset: int, data: bytes, times: LogTimes, *, is_last: bool) -> Iterator[Line]:
    """``is_last``: the data reach the end of the log."""
    pieces = data.split(b"\n")
    ended, rest = pieces[:-1], pieces[-1]
    for content in ended:
        yield from _pieces(rank, offset, content, times, is_cut=False)
        offset += len(content) + 1
    if rest:
        *whole, last = _pieces(rank, offset, rest, times, is_cut=not is_last)
        yield from whole
        yield last if last.is_cut else Line(rank, last.offset, last.at, last.text, is_open=True)


def _pieces(rank: int, offset: int, content: bytes, times: LogTimes, *, is_cut: bool) -> Iterator[Line]:
    cuts = [0]
    while len(content) - cuts[-1] > _PAGES_LONGEST_LINE:
        cuts.append(cuts[-1] + _character_end(content[cuts[-1] : cuts[-1] + _PAGES_LONGEST_LINE]))
    for begin, end in pairwise([*cuts, len(content)]):
        text = content[begin:end].decode("utf-8", "replace")
        yield Line(rank, offset + begin, times.at(offset + begin), text, is_cut=is_cut or end < len(content))


def _character_begin(data: bytes) -> int:
    """The first byte that does not continue a UTF-8 character; a character has at most three such bytes."""
    return next((place for place, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _character_end(data: bytes) -> int:
    """Where to cut without splitting a character; text that is not UTF-8 may be cut anywhere."""
    for back in range(1, 5):
        if back < len(data) and data[-back] & 0xC0 != 0x80:
            return len(data) - back if data[-back] & 0x80 else len(data)
    return len(data)


# --- helpers ------------------------------------------------------------------------------------------------------


def _time(line: Line) -> float:
    return _LONG_AGO if line.at is None else line.at


def _in_order(chosen: Mapping[int, list[Line]]) -> tuple[Line, ...]:
    lines = [line for rank in sorted(chosen) for line in chosen[rank]]
    return tuple(lines if len(chosen) == 1 else sorted(lines, key=_time))


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
