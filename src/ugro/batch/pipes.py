"""Frames over a socket: how many parts, how long each, and then the parts. Standard library only.

The driver never blocks: a slot that waits to send its answer while the driver waits to send a batch would be a
deadlock.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 64  # parts in one call of sendmsg


def head_of(parts: Any) -> bytes:
    sizes = [memoryview(part).nbytes for part in parts]
    return _COUNT.pack(len(sizes)) + b"".join(map(_LENGTH.pack, sizes))


def split(whole: memoryview) -> list[memoryview]:
    """The parts of one frame that is completely there, not copied."""
    (count,) = _COUNT.unpack_from(whole)
    at = _COUNT.size + count * _LENGTH.size
    parts = []
    for place in range(count):
        (size,) = _LENGTH.unpack_from(whole, _COUNT.size + place * _LENGTH.size)
        parts.append(whole[at : at + size])
        at += size
    return parts


class FrameReader:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames: deque[list[memoryview]] = deque()
        self._steps = self._read()
        self._target = next(self._steps)

    def wait(self) -> list[memoryview] | None:
        """From a blocking socket: the next frame, or None at the end."""
        while not self._frames:
            if not self._advance():
                return None
        return self._frames.popleft()

    def available(self) -> tuple[list[list[memoryview]], bool]:
        """From a socket that does not block: the frames that have arrived, and whether more may come."""
        is_open = True
        try:
            while is_open:
                is_open = self._advance()
        except BlockingIOError:
            pass
        frames = list(self._frames)
        self._frames.clear()
        return frames, is_open

    def _advance(self) -> bool:
        """One read; False at the end."""
        try:
            count = self._connection.recv_into(self._target)
        except ConnectionError:
            return False
        if count == 0:
            return False
        self._target = self._target[count:]
        if not self._target:
            self._target = next(self._steps)
        return True

    def _read(self) -> Iterator[memoryview]:
        """Yields what is to be filled next."""
        while True:
            count_bytes = bytearray(_COUNT.size)
            yield memoryview(count_bytes)
            (count,) = _COUNT.unpack(count_bytes)
            sizes_bytes = bytearray(count * _LENGTH.size)
            if sizes_bytes:
                yield memoryview(sizes_bytes)
            parts = [memoryview(bytearray(size)) for (size,) in _LENGTH.iter_unpack(sizes_bytes)]
            for part in parts:
                if part:
                    yield part
            self._frames.append(parts)


class Outbox:
    """What is still to be sent over a socket that does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, parts: Any) -> None:
        views = (memoryview(part).cast("B") for part in (head_of(parts), *parts))
        self._waiting.extend(view for view in views if view.nbytes)

    def flush(self) -> None:
        """Sends what the socket takes. A socket whose other side is gone takes everything."""
        while self._waiting:
            try:
                count = self._connection.sendmsg([self._waiting[i] for i in range(min(len(self), _MOST_AT_ONCE))])
            except BlockingIOError:
                return
            except ConnectionError:
                self._waiting.clear()
                return
            self._skip(count)

    def __len__(self) -> int:
        return len(self._waiting)

    def _skip(self, count: int) -> None:
        while count:
            first = self._waiting[0]
            if count < first.nbytes:
                self._waiting[0] = first[count:]
                return
            count -= first.nbytes
            self._waiting.popleft()


def write_file(descriptor: int, parts: Any) -> None:
    for part in (head_of(parts), *parts):
        rest = memoryview(part).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
