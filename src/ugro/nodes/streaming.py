"""What transfers over a link have in common: no more on its way than is taken, one thread for files, an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ugro.core.errors import RemoteFailure, TimedOut
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.remote import wire

# A transfer may take hours; one that stands still for so long has ended.
STALL_S = 60.0

T = TypeVar("T")


async def in_time(work: Awaitable[T], node: str, what: str) -> T:
    try:
        async with asyncio.timeout(STALL_S):
            return await work
    except TimeoutError as error:
        raise TimedOut(f"{what} stood still for {STALL_S:g} s", subject=node) from error


class Thread:
    """One thread for one transfer: what it is asked for happens in order, also after we stopped waiting for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class Pouring:
    """Bytes towards a node, no more of them on their way than it has room for."""

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
        """Until it has taken some, or the call is over, as its result will tell."""
        said = await in_time(anext(self._taken, None), self._node, self._what)
        if said is None:
            self.is_open = False
            return
        amount = wire.AMOUNT.unpack(said[1])[0] if len(said[1]) == wire.AMOUNT.size else -1
        if not 0 < amount <= self._untaken:
            raise RemoteFailure("it says it took what was not sent", subject=self._node, cause="damaged")
        self._untaken -= amount
