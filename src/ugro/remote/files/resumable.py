"""Files of a run as one stream of bytes, each from the offset on that its reader already has.

Per file: a header, as many bytes as it says, and one byte on how that went. Both sides use this file, and the reader
trusts nothing: what comes is what was asked for, in that order, and never more than was announced.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from typing import Callable, Iterator, List, NamedTuple, Optional

CHUNK = 64 * 1024
BLOCK = 64 * 1024  # of the beginning and of the end of what a reader has: by these it is told whether the file grew
MOST_BYTES = 1 << 50
WHOLE, UNSETTLED, BROKEN = 0, 1, 2  # the byte after a file: it stood still; it may be changing; it must not be used
_HEADER = struct.Struct(">IBQQQqQI")
_CONTENT, _PROBLEM = 1, 2
_MOST_PROBLEM_BYTES = 1000
# A file system's clock ticks slowly: a file that changed just now may change again and look the same.
_SETTLED_NS = 100_000_000


class PiecesError(Exception):
    """What came is not what can have been sent; in words for the user."""


class Head(NamedTuple):
    """Of a file: its bytes from ``offset`` on follow. ``problem``: none do, for this reason."""

    number: int
    offset: int
    length: int
    size: int
    changed_ns: int
    inode: int
    mode: int
    problem: Optional[str] = None


def check_of(fd: int, offset: int) -> str:
    """The same on both sides when what is before ``offset`` is, as far as its first and last block tell."""
    digest = hashlib.sha256(os.pread(fd, min(BLOCK, offset), 0))
    digest.update(os.pread(fd, min(BLOCK, offset), max(0, offset - BLOCK)))
    return digest.hexdigest()


def is_all_checked(offset: int) -> bool:
    """Whether the two blocks were all there is before ``offset``."""
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
    """From ``offset`` on if what is before it is as ``check`` says, else from the beginning."""
    before = os.fstat(fd)
    if not 0 < offset <= before.st_size or check_of(fd, offset) != check:
        offset = 0
    length = before.st_size - offset
    about = (before.st_size, before.st_mtime_ns, before.st_ino, before.st_mode & 0o777)
    yield _HEADER.pack(number, _CONTENT, offset, length, *about)
    end = offset + length
    while offset < end:
        piece = os.pread(fd, min(CHUNK, end - offset), offset)
        if not piece:  # it was cut: what was announced is sent, and is not to be used
            for _ in range(0, end - offset, CHUNK):
                yield bytes(min(CHUNK, end - offset))
                offset += min(CHUNK, end - offset)
            yield bytes([BROKEN])
            return
        offset += len(piece)
        yield piece
    after = os.fstat(fd)
    is_same = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    is_settled = is_same and time.time_ns() - after.st_mtime_ns > _SETTLED_NS
    yield bytes([BROKEN if after.st_size < before.st_size else WHOLE if is_settled else UNSETTLED])


def send_problem(number: int, text: str) -> bytes:
    content = text.encode("utf-8", "replace")[:_MOST_PROBLEM_BYTES]
    return _HEADER.pack(number, _PROBLEM, 0, len(content), 0, 0, 0, 0) + content + bytes([WHOLE])


class Reader:
    """Cuts the stream into files. ``offsets``: what was asked for. The three callables are told what comes."""

    def __init__(
        self,
        offsets: List[int],
        begin: Callable[[Head], None],
        write: Callable[[bytes], None],
        end: Callable[[int], None],
    ) -> None:
        self._offsets = offsets
        self._begin = begin
        self._write = write
        self._end = end
        self._next = 0
        self._buffer = b""
        self._left: Optional[int] = None  # bytes of the file that is open; None: a header comes next
        self._problem: Optional[Head] = None

    def feed(self, content: bytes) -> None:
        content = self._buffer + content
        self._buffer = b""
        while content:
            if self._left is None:
                if len(content) < _HEADER.size:
                    self._buffer = content
                    return
                self._open(content[: _HEADER.size])
                content = content[_HEADER.size :]
            elif self._left:
                piece = content[: self._left]
                self._take(piece)
                self._left -= len(piece)
                content = content[len(piece) :]
            else:
                self._close(content[0])
                content = content[1:]

    def finish(self) -> None:
        if self._buffer or self._left is not None or self._next != len(self._offsets):
            raise PiecesError("the files that came were cut short")

    def _open(self, header: bytes) -> None:
        number, kind, offset, length, size, changed_ns, inode, mode = _HEADER.unpack(header)
        if number != self._next or number >= len(self._offsets):
            raise PiecesError("a file came that was not asked for")
        self._next += 1
        self._left = length
        if kind == _PROBLEM and length <= _MOST_PROBLEM_BYTES:
            self._problem = Head(number, 0, length, 0, 0, 0, 0, "")
            return
        is_sound = kind == _CONTENT and offset in (0, self._offsets[number]) and offset + length == size < MOST_BYTES
        if not is_sound:
            raise PiecesError("what is said of a file makes no sense")
        self._begin(Head(number, offset, length, size, changed_ns, inode, mode & 0o777))

    def _take(self, piece: bytes) -> None:
        if self._problem is not None:
            text = (self._problem.problem or "") + piece.decode("utf-8", "replace")
            self._problem = self._problem._replace(problem=text)
        else:
            self._write(piece)

    def _close(self, state: int) -> None:
        if state not in (WHOLE, UNSETTLED, BROKEN):
            raise PiecesError("what is said of a file makes no sense")
        self._left = None
        if self._problem is None:
            self._end(state)
        else:
            head, self._problem = self._problem, None
            self._begin(head)
