"""Logs that cannot fill a disk: the head of a log beyond its cap is returned to the file system.

Ranks write directly into their files, so nothing slows them down and nothing is lost if a supervisor dies. Offsets do
not change: a hole is punched where the head was. If that is impossible, the file is truncated, and a base counts the
bytes that were dropped. A small file beside the log says from which offset on it can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import List, NamedTuple

from ugro.remote.durable import Numbers

_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Cut(NamedTuple):
    first: int  # the first offset that can still be read
    base: int  # the offset of the file's first byte
    is_moving: bool  # the base is changing: the offset of what is read now is unknown


def read_cut(log: str) -> Cut:
    """A file without a sidecar was never cut."""
    first, base, is_moving = Numbers(_sidecar(log), 3).read()
    return Cut(first, base, bool(is_moving))


class CappedLog:
    """One log in its supervisor, which alone writes the sidecar."""

    def __init__(self, path: str, cap_bytes: int, *, is_there: bool = False) -> None:
        """``is_there``: it exists with its sidecar, and was never cut."""
        self._cap_bytes = cap_bytes
        self._sidecar = Numbers(_sidecar(path), 3)
        self._cut = Cut(0, 0, False)
        self._can_punch = True
        # Written now: it is needed when the disk is full, and then a new file could not be created.
        if not is_there:
            self._write(self._cut)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    @property
    def is_whole(self) -> bool:
        return self._cut.first == 0

    def trim(self, is_growing: bool = True) -> None:
        """``is_growing``: its rank still writes. The last lines of one that has ended are worth more than space."""
        size = os.fstat(self._fd).st_size
        length = self._cut.base + size - self._cut.first
        if length > self._cap_bytes and self._can_punch:
            self._punch(size)
        if not self._can_punch and length > self._cap_bytes * (1 if is_growing else 4):
            self._empty(size)

    def _punch(self, size: int) -> None:
        start = self._cut.first - self._cut.base
        end = (size - self._cap_bytes * 3 // 4) // _PAGE * _PAGE
        # Recorded first, so that a reader that checks after reading can tell data from a hole.
        self._write(self._cut._replace(first=self._cut.base + end))
        if _libc.fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, start, end - start) != 0:
            self._can_punch = False

    def _empty(self, size: int) -> None:
        self._write(self._cut._replace(is_moving=True))
        # Bytes written between the two are lost and not counted; later offsets are then a little low.
        os.ftruncate(self._fd, 0)
        base = self._cut.base + size
        self._write(Cut(base, base, False))

    def _write(self, cut: Cut) -> None:
        self._sidecar.write(cut.first, cut.base, cut.is_moving, is_lasting=False)
        self._cut = cut


def last_lines(log: str, count: int, most_bytes: int) -> List[str]:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        cut = read_cut(log)
        size = file.seek(0, os.SEEK_END)
        start = max(cut.first - cut.base, size - most_bytes, 0)
        file.seek(start)
        lines = file.read(most_bytes).split(b"\n")
        if start > 0:
            lines = lines[1:] or lines
        if lines and not lines[-1]:
            lines.pop()
        return [line.decode("utf-8", "replace") for line in lines[-count:]]
    return []


def _sidecar(log: str) -> str:
    return log + ".cut"
