"""What listens at the replica's port: passes requests on to Serve's proxy, below the application's path.

One request for each connection to the proxy; what follows its headers passes as it is, so bodies, streams and web
sockets do. A proxy that is away gets nothing: the connection is closed without an answer, and the door asks again.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import suppress

READY, ALIVE = "/-/healthz", "/-/alive"  # paths that it answers itself: Serve's proxy uses the same beginning
_MOST_HEADERS = 128 * 1024
_HEADERS_S = 60.0
_CONNECT_S = 5.0
_PIECE = 64 * 1024
_END = b"\r\n\r\n"
_HOP = (b"connection", b"keep-alive", b"proxy-connection")


class Relay:
    def __init__(self, prefix: str, port: int, secret: str, problem: Callable[[], str | None]) -> None:
        self._prefix = prefix.encode()
        self._port = port
        self._bearer = f"Bearer {secret}".encode() if secret else None
        self._problem = problem  # why it is not ready; None: it is

    async def start(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._accept, host, port, limit=_MOST_HEADERS, backlog=512)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_HEADERS_S):
                head = await reader.readuntil(_END)
            answer = self._own(head)
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            else:
                await self._pass(rewritten(head, self._prefix), reader, writer)
        writer.close()

    def _own(self, head: bytes) -> bytes | None:
        """What it says itself; None: the request is the application's."""
        path = target_of(head)
        if path == ALIVE.encode():
            return _answer("200 OK", "alive")
        if path == READY.encode():
            problem = self._problem()
            return _answer("503 Service Unavailable", problem) if problem else _answer("200 OK", "ready")
        if not path.startswith(b"/"):
            return _answer("400 Bad Request", "a path is needed")
        if self._bearer is not None and not hmac.compare_digest(header_of(head, b"authorization"), self._bearer):
            return _answer("401 Unauthorized", "the service's own secret is needed")
        return None

    async def _pass(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_S):
            back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            forth.write(head)
            sending = asyncio.create_task(_pump(reader, forth), name="pass a request on")
            try:
                await _pump(back, writer)
            finally:
                sending.cancel()
        finally:
            forth.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()


def target_of(head: bytes) -> bytes:
    """The path of a request, with its query."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    return words[1] if len(words) == 3 else b""


def header_of(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def rewritten(head: bytes, prefix: bytes) -> bytes:
    """Below the application's path, without the service's secret, and the only one of its connection."""
    first, *lines = head.removesuffix(_END).split(b"\r\n")
    method, path, version = first.split(b" ")
    is_upgrade = bool(header_of(head, b"upgrade"))
    dropped = {b"authorization", *(() if is_upgrade else _HOP)}
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in dropped]
    closing = [] if is_upgrade else [b"Connection: close"]
    return b"\r\n".join([b" ".join((method, prefix + path, version)), *kept, *closing]) + _END


def _answer(status: str, text: str) -> bytes:
    body = text.encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
