"""Calls in progress over a link: with an answer (``Answer``), output too (``Stream``), input too (``Duplex``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Concatenate, ParamSpec, Protocol

from ugro.kernel.support.errors import Unreachable
from ugro.node import wire
from ugro.node.program import Call

P = ParamSpec("P")


def asked(serve: Callable[Concatenate[Call, P], None], *_: P.args, **params: P.kwargs) -> tuple[str, dict[str, Any]]:
    """Returns the name and the parameters of a method, for a link. ``serve`` is the function that nodes serve it by.

    So mypy compares what is asked with what is served; see ``ugro.node.program.method``.
    """
    return serve.__dict__["method"], params


class Talker(Protocol):
    """What a call needs from its link."""

    def send(self, kind: int, number: int, payload: bytes = b"") -> None: ...

    def forget(self, number: int) -> None: ...

    async def clear(self) -> None:
        """Waits until the link has taken most of what was sent."""


class Answer:
    """A call whose answer is awaited as ``future``."""

    __slots__ = ("_is_over", "_link", "future", "method", "number")

    def __init__(self, link: Talker, number: int, future: asyncio.Future[dict[str, Any]]) -> None:
        self.number = number
        self.method = ""
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

    def granted(self, payload: bytes) -> None:
        raise wire.ProtocolError(f"call {self.number} has no input, but the node granted some")

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


class Duplex(Stream):
    """A call with output and input. An empty piece of output says that the node sends no more.

    The node's first grant says that the other end is there. Until then, and if it does not come, nothing is sent.
    """

    __slots__ = ("_changed", "_has_all", "_is_open", "_room")

    def __init__(self, link: Talker, number: int, future: asyncio.Future[dict[str, Any]]) -> None:
        super().__init__(link, number, future)
        self._room = 0
        self._is_open = False
        self._has_all = False
        self._changed = asyncio.Event()

    async def opened(self) -> None:
        """Raises why it was not."""
        await self._changed.wait()
        if not self._is_open:
            await self.future

    async def send(self, piece: bytes) -> None:
        """As fast as the node takes it. What is sent to a call that is over is dropped: its output says why."""
        left = memoryview(piece)
        while left:
            while self._room == 0 and not self._is_over:
                self._changed.clear()
                await self._changed.wait()
            await self._link.clear()
            if self._is_over:
                return
            part = left[: min(self._room, wire.CHUNK)]
            self._room -= len(part)
            self._link.send(wire.INPUT, self.number, bytes(part))
            left = left[len(part) :]

    def end(self) -> None:
        """Nothing more is sent; output still comes."""
        if not self._is_over:
            self._link.send(wire.INPUT, self.number)

    def granted(self, payload: bytes) -> None:
        amount = wire.AMOUNT.unpack(payload)[0] if len(payload) == wire.AMOUNT.size else 0
        self._room += amount
        if not amount or self._room > wire.WINDOW:
            raise wire.ProtocolError(f"call {self.number} granted more than it has room for")
        self._is_open = True
        self._changed.set()

    def feed(self, kind: int, payload: bytes) -> None:
        if self._has_all or not self._is_open or kind != wire.OUT:
            raise wire.ProtocolError(f"call {self.number} sent output that was not expected")
        if payload:
            super().feed(kind, payload)
        else:
            self._has_all = True
            self._chunks.put_nowait((kind, payload))

    def finish(self, result: dict[str, Any]) -> None:
        super().finish(result)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._changed.set()
