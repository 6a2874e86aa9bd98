"""Frames over one connection to a host. Nobody waits to send: a thread does."""

from __future__ import annotations

import queue
import threading
from typing import Any

from ugro.batch.jobs.cluster import ByteStream
from ugro.batch.pipes import FrameReader, head_of
from ugro.core.errors import UgroError

_READ = 256 * 1024
_JOINED = 64 * 1024  # smaller parts go together


class HostConnection:
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reader = FrameReader(_Reading(stream))  # type: ignore[arg-type]  # it only receives
        self._frames: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="pool: to a host", daemon=True)
        self._sender.start()

    def read(self) -> list[Any] | None:
        """The next frame; None when it was cut off."""
        return self._reader.wait()

    def send(self, frame: list[Any]) -> None:
        self._frames.put(frame)

    def abort(self) -> None:
        """Wakes the thread that reads, which closes it."""
        self._stream.abort()

    def close(self) -> None:
        self._frames.put(None)
        self._stream.abort()
        self._sender.join()
        self._stream.close()

    def _send(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._send_one(frame)
        except UgroError:
            self._stream.abort()  # who reads sees it

    def _send_one(self, frame: list[Any]) -> None:
        small = bytearray(head_of(frame))
        for part in frame:
            if len(part) <= _JOINED:
                small += part
                continue
            self._stream.sendall(bytes(small))
            small.clear()
            self._stream.sendall(part)
        if small:
            self._stream.sendall(bytes(small))


class _Reading:
    """As much of a socket as a reader of frames needs."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._left = memoryview(b"")

    def recv_into(self, target: memoryview) -> int:
        if not self._left:
            try:
                self._left = memoryview(self._stream.recv(_READ))
            except UgroError as error:
                raise ConnectionError(str(error)) from error
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
