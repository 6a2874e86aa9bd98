"""Shared by all transfers over a link: calls and streams, flow control, one thread for files, a limit on stalls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ugro.core.errors import RemoteFailure, TimedOut
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.remote import wire

# A transfer may take hours; one without progress for so long has failed.
STALL_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """The base of what an agent asks of one part of a node program."""

    node: Node
    identity: Identity
    connect_s: float
    prefix: ClassVar[str] = ""  # of the methods' names

    @property
    def name(self) -> str:
        return self.node.spec.name

    async def _call(self, method: str, timeout_s: float, **params: Any) -> dict[str, Any]:
        link = await self.node.ready(self.connect_s, patiently=True)
        return await link.call(self.prefix + method, self.identity.params(**params), timeout_s=timeout_s)

    @asynccontextmanager
    async def _stream(self, method: str, **params: Any) -> AsyncIterator[tuple[Link, Stream]]:
        link = await self.node.ready(self.connect_s, patiently=True)
        stream = link.stream(self.prefix + method, self.identity.params(**params))
        try:
            yield link, stream
        finally:
            stream.cancel()


async def in_time(work: Awaitable[T], node: str, what: str, stall_s: float = STALL_S) -> T:
    try:
        async with asyncio.timeout(stall_s):
            return await work
    except TimeoutError as error:
        raise TimedOut(f"{what} made no progress for {stall_s:g} s", subject=node) from error


class Thread:
    """One thread for one transfer: work is done in order, also after its caller stopped waiting for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class Upload:
    """Sends bytes to a node, never more at once than its window has room for."""

    def __init__(self, link: Link, stream: Stream, node: str, what: str, window: int = wire.WINDOW) -> None:
        self.is_open = True
        self._link = link
        self._number = stream.number
        self._taken = aiter(stream)
        self._node = node
        self._what = what
        self._untaken = 0
        self._window = window

    async def send(self, piece: bytes) -> None:
        while self.is_open and self._untaken + len(piece) > self._window:
            await self._wait()
        if self.is_open and piece:
            self._untaken += len(piece)
            self._link.send(wire.INPUT, self._number, piece)

    async def end(self) -> None:
        if self.is_open:
            self._link.send(wire.INPUT, self._number)
        while self.is_open:
            await self._wait()

    async def _wait(self) -> None:
        """Until the node has taken some, or the call is over; its result says why."""
        frame = await in_time(anext(self._taken, None), self._node, self._what)
        if frame is None:
            self.is_open = False
            return
        amount = wire.AMOUNT.unpack(frame[1])[0] if len(frame[1]) == wire.AMOUNT.size else -1
        if not 0 < amount <= self._untaken:
            raise RemoteFailure("it acknowledged bytes that were not sent", subject=self._node, cause="damaged")
        self._untaken -= amount
