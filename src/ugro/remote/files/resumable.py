"""Files as one stream of bytes, each from the offset that its reader already has.

Each file is a header, as many bytes as the header says, and a trailer with the outcome and a checksum. Node and agent
use this module in both directions. The reader trusts nothing: it accepts the files it asked for, in that order, and
never more bytes than announced.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import zlib
from typing import Iterator, List, NamedTuple, Optional, Protocol

from ugro.remote.files.listing import MOST_BYTES

CHUNK = 64 * 1024
BLOCK = 64 * 1024  # the first and the last block before an offset are compared to see whether a file only grew
WHOLE, UNSETTLED, BROKEN = 0, 1, 2  # the file did not change; it may still be changing; it must not be used
_HEADER = struct.Struct(">IBQQQqQI")
_TRAILER = struct.Struct(">BI")
_CONTENT, _PROBLEM = 1, 2
_MOST_PROBLEM_BYTES = 1000
# The clock of a file system ticks slowly: a file that changed just now may change again and look the same.
_SETTLED_NS = 100_000_000


class StreamError(Exception):
    """The stream is not one that can have been sent; the text is for the user."""


class Head(NamedTuple):
    """Announces the bytes of a file from ``offset`` on, or the ``problem`` because of which none follow."""

    number: int
    offset: int
    length: int
    size: int
    changed_ns: int
    inode: int
    mode: int
    problem: Optional[str] = None


class Sink(Protocol):
    """Receives the files of a stream, one after the other."""

    def begin(self, head: Head) -> None: ...

    def write(self, piece: bytes) -> None: ...

    def end(self, state: int) -> None: ...


def check_of(fd: int, offset: int) -> str:
    """Equal on both sides if the first and the last block before ``offset`` are."""
    digest = hashlib.sha256(os.pread(fd, min(BLOCK, offset), 0))
    digest.update(os.pread(fd, min(BLOCK, offset), max(0, offset - BLOCK)))
    return digest.hexdigest()


def is_all_checked(offset: int) -> bool:
    """Whether the two blocks cover everything before ``offset``."""
    return offset <= 2 * BLOCK


def content_hash(fd: int) -> str:
    digest = hashlib.sha256()
    offset = 0
    while True:
        piece = os.pread(fd, 1 << 20, offset)
        if not piece:
            return digest.hexdigest()
        digest.update(piece)
        offset += len(piece)


def send(number: int, fd: int, offset: int, check: str) -> Iterator[bytes]:
    """From ``offset`` if the bytes before it match ``check``, otherwise from the beginning."""
    before = os.fstat(fd)
    if not 0 < offset <= before.st_size or check_of(fd, offset) != check:
        offset = 0
    about = (before.st_size, before.st_mtime_ns, before.st_ino, before.st_mode & 0o777)
    header = _HEADER.pack(number, _CONTENT, offset, before.st_size - offset, *about)
    checksum = zlib.crc32(header)
    yield header
    is_cut = False
    while offset < before.st_size:
        most = min(CHUNK, before.st_size - offset)
        piece = b"" if is_cut else os.pread(fd, most, offset)
        if not piece:  # it was truncated: zeros follow, as many as announced, and must not be used
            is_cut, piece = True, bytes(most)
        offset += len(piece)
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield _trailer(BROKEN if is_cut else _state(before, os.fstat(fd)), checksum)


def send_problem(number: int, text: str) -> bytes:
    content = text.encode("utf-8", "replace")[:_MOST_PROBLEM_BYTES]
    sent = _HEADER.pack(number, _PROBLEM, 0, len(content), 0, 0, 0, 0) + content
    return sent + _trailer(WHOLE, zlib.crc32(sent))


def _state(before: os.stat_result, after: os.stat_result) -> int:
    if after.st_size < before.st_size:
        return BROKEN
    is_same = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    # Also one of the future, by a clock that was set back: what is written now gets another time.
    return WHOLE if is_same and abs(time.time_ns() - after.st_mtime_ns) > _SETTLED_NS else UNSETTLED


def _trailer(state: int, checksum: int) -> bytes:
    return _TRAILER.pack(state, zlib.crc32(bytes([state]), checksum))


class Reader:
    """Splits the stream into files. ``offsets``: what was asked for, one for each file."""

    def __init__(self, offsets: List[int], sink: Sink) -> None:
        self._offsets = offsets
        self._sink = sink
        self._next = 0
        self._buffer = b""
        self._left: Optional[int] = None  # bytes of the open file; None: a header comes next
        self._checksum = 0
        self._problem: Optional[Head] = None

    def feed(self, content: bytes) -> None:
        content = self._buffer + content
        self._buffer = b""
        while content:
            if self._left:
                piece = content[: self._left]
                self._take(piece)
                self._left -= len(piece)
                content = content[len(piece) :]
                continue
            size = _HEADER.size if self._left is None else _TRAILER.size
            if len(content) < size:
                self._buffer = content
                return
            (self._open if self._left is None else self._close)(content[:size])
            content = content[size:]

    def finish(self) -> None:
        if self._buffer or self._left is not None or self._next != len(self._offsets):
            raise StreamError("the transfer was cut short")

    def _open(self, header: bytes) -> None:
        number, kind, offset, length, size, changed_ns, inode, mode = _HEADER.unpack(header)
        if number != self._next or number >= len(self._offsets):
            raise StreamError("a file came that was not asked for")
        self._next += 1
        self._left = length
        self._checksum = zlib.crc32(header)
        if kind == _PROBLEM and length <= _MOST_PROBLEM_BYTES:
            self._problem = Head(number, 0, length, 0, 0, 0, 0, "")
            return
        is_valid = kind == _CONTENT and offset in (0, self._offsets[number]) and offset + length == size < MOST_BYTES
        if not is_valid:
            raise StreamError("invalid header of a file")
        self._sink.begin(Head(number, offset, length, size, changed_ns, inode, mode & 0o777))

    def _take(self, piece: bytes) -> None:
        self._checksum = zlib.crc32(piece, self._checksum)
        if self._problem is not None:
            text = (self._problem.problem or "") + piece.decode("utf-8", "replace")
            self._problem = self._problem._replace(problem=text)
        else:
            self._sink.write(piece)

    def _close(self, trailer: bytes) -> None:
        state, _ = _TRAILER.unpack(trailer)
        if trailer != _trailer(state, self._checksum) or state not in (WHOLE, UNSETTLED, BROKEN):
            raise StreamError("a file was damaged during the transfer")
        self._left = None
        if self._problem is None:
            self._sink.end(state)
        else:
            head, self._problem = self._problem, None
            self._sink.begin(head)
