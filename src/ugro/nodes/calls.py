"""Calls in progress over a link: with an answer only (``Answer``), or with output too (``Stream``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from ugro.core.errors import Unreachable
from ugro.remote import wire


class Talker(Protocol):
    """What a call needs from its link."""

    def send(self, kind: int, number: int, payload: bytes = b"") -> None: ...

    def forget(self, number: int) -> None: ...


class Answer:
    """A call whose answer is awaited as ``future``."""

    __slots__ = ("_is_over", "_link", "future", "number")

    def __init__(self, link: Talker, number: int, future: asyncio.Future[dict[str, Any]]) -> None:
        self.number = number
        self.future = future
        self._link = link
        self._is_over = False

    async def result(self) -> dict[str, Any]:
        return await self.future

    def ask_to_stop(self) -> None:
        if not self._is_over:
            self._link.send(wire.CANCEL, self.number)

    def cancel(self, reason: Exception | None = None) -> None:
        """Asks the node to stop the call, without waiting for it."""
        if not self._is_over:
            self.ask_to_stop()
            self._link.forget(self.number)
            self.fail(reason or Unreachable("the call was cancelled", cause="cancelled"))

    def feed(self, kind: int, payload: bytes) -> None:
        raise wire.ProtocolError(f"call {self.number} has no output, but the node sent some")

    def finish(self, result: dict[str, Any]) -> None:
        self._is_over = True
        if not self.future.done():  # cancelling a task that waits for it cancels the future, too
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        self._is_over = True
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as retrieved: a caller may drop the call without asking for its result


class Stream(Answer):
    """A call with output. Reading grants the node more credit; not reading holds it back."""

    __slots__ = ("_chunks", "_unread")

    def __init__(self, link: Talker, number: int, future: asyncio.Future[dict[str, Any]]) -> None:
        super().__init__(link, number, future)
        self._chunks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._unread = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
            self._unread -= len(chunk[1])
            self._link.send(wire.CREDIT, self.number, wire.AMOUNT.pack(len(chunk[1])))

    def feed(self, kind: int, payload: bytes) -> None:
        self._unread += len(payload)
        # Empty pieces use no credit, and could fill our memory.
        if self._unread > wire.WINDOW or not payload:
            raise wire.ProtocolError(f"call {self.number} sent more than it was granted")
        self._chunks.put_nowait((kind, payload))

    def finish(self, result: dict[str, Any]) -> None:
        super().finish(result)
        self._chunks.put_nowait(None)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._chunks.put_nowait(None)
