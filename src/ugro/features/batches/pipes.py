"""Frames over a socket: how many parts, how long each, and then the parts. Standard library only.

The driver never blocks: a slot that waits to send its answer while the driver waits to send a batch would be a
deadlock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from ugro.features.batches.worker import Worker

# --- session ----------------------------------------------------------------------------------------------------------
# Messages between a pool and a host: each arrives once and in order, over one connection after the other.
#
# A message is kept until the other side has said that it has it. After a cut each side says what it has, and the rest
# is sent again: a link that was lost for a moment, or an agent that was killed, costs no batch. Runs on nodes too.


_HEAD = struct.Struct("<QQBQ")  # its number, the newest one that we have, its kind, the slot


class Kind(IntEnum):
    # From the pool to the host.
    START = 1  # a slot of that number
    BATCH = 2  # for the slot
    END = 3  # the slot
    PUBLISH = 4  # parts under the name in the first one
    WITHDRAW = 5
    QUIT = 6
    # From the host to the pool.
    READY = 10  # the slot
    ANSWER = 11  # of the slot
    LOST = 12  # the slot; how is in the first part, as JSON
    RECEIVED = 13  # nothing else is said


class Message:
    __slots__ = ("kind", "parts", "slot")

    def __init__(self, kind: Kind, slot: int, parts: Any) -> None:
        self.kind = kind
        self.slot = slot
        self.parts = parts


class Session:
    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._kept: deque[tuple[int, list[Any]]] = deque()

    def message(self, kind: Kind, slot: int = 0, parts: Any = ()) -> list[Any]:
        """As parts of a frame; kept until it has arrived."""
        self._sent += 1
        frame = [_HEAD.pack(self._sent, self.received, kind, slot), *parts]
        self._kept.append((self._sent, frame))
        return frame

    def read(self, frame: Any) -> Message | None:
        """None: it came before the cut already."""
        number, received, kind, slot = _HEAD.unpack(frame[0])
        self._forget(received)
        if number <= self.received:
            return None
        if number != self.received + 1:
            raise ValueError(f"message {number} after {self.received}")
        self.received = number
        return Message(Kind(kind), slot, frame[1:])

    def again(self, received: int) -> list[list[Any]]:
        """What the other side does not have, after it said what it has."""
        self._forget(received)
        return [frame for _, frame in self._kept]

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()


# --- pipes ------------------------------------------------------------------------------------------------------------


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


# --- local worker -----------------------------------------------------------------------------------------------------
# A slot on this machine: a process of its own, which ends with its driver. Started by ``local``.


_NOTE_BYTES = 8
FOLDER_VARIABLE = "UGRO_BATCH_FOLDER"  # where published things are whose names are no absolute paths
_FOLDER = os.environ.get(FOLDER_VARIABLE, "/")


def main(connection_fd: int, life_fd: int, note_fd: int) -> None:
    for descriptor in (connection_fd, life_fd, note_fd):
        os.set_inheritable(descriptor, False)
    _end_with(life_fd)
    note = memoryview(mmap.mmap(note_fd, _NOTE_BYTES)).cast("q")
    import cloudpickle  # of the extra "batch"

    def dumps(value: Any, buffer_callback: Any) -> bytes:
        return bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback))

    with socket.socket(fileno=connection_fd) as connection:
        worker = Worker(_fetch, note, dumps)
        frames, outbox = FrameReader(connection), Outbox(connection)
        _send(outbox, [b"ready"])
        while (parts := frames.wait()) is not None:
            _send(outbox, worker.answer(parts))
            parts = None  # not kept while the next batch is waited for
    sys.exit(0)


def _send(outbox: Outbox, parts: Any) -> None:
    outbox.add(parts)
    outbox.flush()


def _end_with(life_fd: int) -> None:
    """The kernel kills this process and all that it started when the driver's end of this socket closes.

    Not a thread, which an item that holds the interpreter's lock would stop, and not the parent-death signal, which
    comes when the *thread* that started this process ends.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life_fd, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os.killpg(0, signal.SIGKILL)


def _fetch(name: str) -> list[memoryview]:
    with open(os.path.join(_FOLDER, name.partition(":")[2]), "rb") as file:
        return split(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
