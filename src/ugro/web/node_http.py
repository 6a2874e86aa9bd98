"""One HTTP request to what listens on a node's loopback, through the agent's link to it; the answer as it arrives.

A node is not trusted: what it answers is bounded, and nothing of its head but status and type is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

import h11

from ugro.agent.ops.tunnels import Tunnels, Wanted
from ugro.core.errors import RemoteFailure, TimedOut
from ugro.nodes.calls import Duplex

MOST_BYTES = 16 << 20  # of an answer
_HEAD_S = 600.0  # a service that was scaled to zero holds the request until it has started
_PIECE_S = 300.0
_LONGEST_HEAD = 32 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """A port of a node's loopback."""

    node: str
    port: int


class Answer:
    """Its head is here; ``pieces`` is the rest. It must be closed, or its pieces read to the end."""

    def __init__(self, exchange: _Exchange, head: h11.Response) -> None:
        self._exchange = exchange
        self.status = head.status_code
        types = [value for name, value in head.headers if name == b"content-type"]
        self.type = types[0].decode("ascii", "replace").partition(";")[0].strip() if types else ""

    async def pieces(self) -> AsyncGenerator[bytes]:
        try:
            async for piece in self._exchange.body():
                yield piece
        finally:
            self.close()

    async def text(self, most: int) -> str:
        """As much of its beginning."""
        found = b""
        async for piece in self.pieces():
            found += piece
            if len(found) >= most:
                break
        self.close()
        return found[:most].decode("utf-8", "replace")

    def close(self) -> None:
        self._exchange.close()


async def post(tunnels: Tunnels, place: Place, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """Waits for the head of the answer. Raises UgroError."""
    duplex = await tunnels.open(Wanted(place.node, place.port), is_chosen_here=True)
    exchange = _Exchange(tunnels, duplex, place)
    with ExitStack() as unless_answered:  # also if nobody waits for it any more
        unless_answered.callback(exchange.close)
        await exchange.send(path, body, headers)
        answer = Answer(exchange, await exchange.head())
        unless_answered.pop_all()
    return answer


class _Exchange:
    def __init__(self, tunnels: Tunnels, duplex: Duplex, place: Place) -> None:
        self._tunnels = tunnels
        self._duplex = duplex
        self._pieces = aiter(duplex)
        self._place = place
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)

    async def send(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        own = {"host": f"127.0.0.1:{self._place.port}", "content-length": str(len(body)), "connection": "close"}
        request = h11.Request(method="POST", target=path, headers=list({**headers, **own}.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            await self._duplex.send(self._protocol.send(event) or b"")

    async def head(self) -> h11.Response:
        event = await self._next(_HEAD_S)
        while isinstance(event, h11.InformationalResponse):
            event = await self._next(_HEAD_S)
        if not isinstance(event, h11.Response):
            raise self._broken("it closed the connection without an answer")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        total = 0
        while isinstance(event := await self._next(_PIECE_S), h11.Data):
            total += len(event.data)
            if total > MOST_BYTES:
                raise self._broken(f"its answer is larger than {MOST_BYTES >> 20} MiB")
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise self._broken("its answer was cut off")

    async def _next(self, wait_s: float) -> h11.Event:
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._received(wait_s))
        except h11.RemoteProtocolError as error:
            raise self._broken(f"its answer is invalid: {error}") from error
        assert not isinstance(event, type)  # NEED_DATA and PAUSED are classes; a client is never paused
        return event

    async def _received(self, wait_s: float) -> bytes:
        """Nothing: the other end sends no more."""
        try:
            async with asyncio.timeout(wait_s):
                _, piece = await anext(self._pieces)
        except StopAsyncIteration:
            return b""
        except TimeoutError as error:
            text = f"no answer within {wait_s:g} s"
            raise TimedOut(text, subject=f"{self._place.node} port {self._place.port}") from error
        return piece

    def _broken(self, text: str) -> RemoteFailure:
        return RemoteFailure(text, subject=f"{self._place.node} port {self._place.port}", cause="invalid")

    def close(self) -> None:
        self._tunnels.close(self._duplex)
