"""The server behind which requests wait while no replica is ready.

HAProxy gives it one request at a time, and ours comes first and stays: all others wait in HAProxy's own queue, from
which a replica takes them as soon as it is ready. In the moment in which ours is not there, as after a restart, one of
a user may come here instead: it is dropped without an answer when a replica is ready, and HAProxy gives it that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable

from ugro.workloads.door.machine import TimedOutError

_AGAIN_S = 0.1
_LOOK_S = 0.1
_HEAD_S = 20.0


class WaitingRoom:
    def __init__(self, listener: socket.socket, is_any_ready: Callable[[], Awaitable[bool]]) -> None:
        self._listener = listener
        self._is_any_ready = is_any_ready
        self._mark = secrets.token_hex(16).encode()
        self._guests: set[asyncio.StreamWriter] = set()
        self._has_come = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self._guests)

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self._accept, sock=self._listener)
        try:
            await asyncio.gather(self._occupy(), self._release())
        finally:
            server.close()

    async def _occupy(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection("inside")
                writer.write(b"GET / HTTP/1.1\r\nHost: door\r\nX-Request-Id: " + self._mark + b"\r\n\r\n")
                try:
                    await reader.read(-1)  # until HAProxy ends
                finally:
                    writer.close()
            await asyncio.sleep(_AGAIN_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
            if self._mark not in head:
                self._guests.add(writer)
                self._has_come.set()
            while await reader.read(65536):
                pass
        except (OSError, TimedOutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._guests.discard(writer)
            writer.close()

    async def _release(self) -> None:
        while True:
            await self._has_come.wait()
            if not self._guests:
                self._has_come.clear()
            elif await self._is_any_ready():
                for guest in self._guests:
                    guest.close()
            await asyncio.sleep(_LOOK_S)
