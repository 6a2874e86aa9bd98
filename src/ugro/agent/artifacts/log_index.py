"""A small text file beside a log that says when its bytes arrived, and which of them never did.

``time SECONDS OFFSET``: the bytes from this offset on arrived at this time or within a second after it, up to the next
such line. ``gap FROM TO``: the node dropped these bytes before they could be fetched; the log has a hole there. A log
that arrived as a whole has no such file: it arrived when the file was written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

EVERY_S = 1.0
_BLOCK = 64 * 1024


class LogIndexWriter:
    """For one log, while it is fetched. Created again after a restart, it only appends."""

    def __init__(self, log: Path) -> None:
        self._path = index_path(log)
        self._noted_at = float("-inf")

    def note(self, size: int, offset: int, arrived_unix_s: float | None = None) -> None:
        """Before bytes are written at ``offset`` of a log that has ``size`` so far; they arrived now, or then."""
        lines = f"gap {size} {offset}\n" if offset > size else ""
        if time.monotonic() - self._noted_at >= EVERY_S:
            self._noted_at = time.monotonic()
            lines += f"time {arrived_unix_s or time.time():.3f} {offset}\n"
        if lines:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)


class LogIndex:
    """Read while it grows: ``refresh`` reads what was added since."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._path = index_path(log)
        self._read = 0
        self._times: list[tuple[float, int]] = []
        self._gaps: dict[int, int] = {}  # the first byte of each, and the one after its last

    def refresh(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines, end, _ = file.read().rpartition(b"\n")  # the last line may be half written
        except FileNotFoundError:
            return
        self._read += len(lines) + len(end)
        for line in lines.decode().splitlines():
            match line.split():
                case ["time", seconds, offset]:
                    self._times.append((float(seconds), int(offset)))
                case ["gap", start, stop]:
                    # Noted again, and larger, if an agent died before it wrote behind the gap.
                    self._gaps[int(start)] = int(stop)

    def offset_at(self, since_unix_s: float, size: int) -> int:
        """The offset from which a log of ``size`` bytes arrived at that time or later; up to a second too early."""
        times = self._times or [(written_at(self._log) or 0.0, 0)]
        return next((offset for seconds, offset in times if seconds + EVERY_S > since_unix_s), size)

    def gap_at(self, offset: int) -> tuple[int, int] | None:
        return next((gap for gap in self._gaps.items() if gap[0] <= offset < gap[1]), None)

    def next_gap(self, offset: int) -> int | None:
        """Where the first gap behind ``offset`` begins."""
        return min((start for start in self._gaps if start > offset), default=None)

    def begin_after(self, offset: int) -> int:
        """The end of the last gap before ``offset``, or 0: how far back the bytes are contiguous."""
        return max((end for end in self._gaps.values() if end <= offset), default=0)


def written_at(log: Path) -> float | None:
    """When a log without an index arrived."""
    try:
        return log.stat().st_mtime
    except FileNotFoundError:
        return None


def line_begin(log: Path, offset: int, least: int) -> int:
    """Where the line with the byte before ``offset`` begins; not before ``least``, and not far back."""
    least = max(least, offset - _BLOCK)
    with log.open("rb") as file:
        file.seek(least)
        found = file.read(offset - least).rfind(b"\n")
    return least + found + 1 if found >= 0 else least


def last_lines(log: Path, size: int, lines: int, least: int) -> int:
    """Where the last ``lines`` lines of the first ``size`` bytes begin; not before ``least``."""
    with log.open("rb") as file:
        end, wanted = size, lines
        while end > least:
            begin = max(least, end - _BLOCK)
            file.seek(begin)
            block = file.read(end - begin)
            if end == size and block.endswith(b"\n"):
                wanted += 1
            at = len(block)
            while wanted and (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
            if not wanted:
                return begin + at + 1
            end = begin
    return least


def index_path(log: Path) -> Path:
    return log.with_suffix(".times")

