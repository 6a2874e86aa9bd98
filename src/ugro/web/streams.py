"""Live streams by session: a few for each, and they end when the session does."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_PER_SESSION = 12  # a browser opens six connections at most, and all its tabs share one stream


class Streams:
    def __init__(self) -> None:
        self._open: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def serve(self, session: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._open[session]) >= MOST_PER_SESSION:
            text = f"too many live streams of this browser (limit {MOST_PER_SESSION}); close some tabs\n"
            await PlainTextResponse(text, 429)(scope, receive, send)
            return
        stream = _Stream(receive, send)
        self._open[session].add(stream.is_over)
        try:
            await app(scope, stream.receive, stream.send)
            await stream.finish()
        finally:
            self._open[session].discard(stream.is_over)
            if not self._open[session]:
                del self._open[session]

    def end(self, session: str) -> None:
        for is_over in self._open.get(session, ()):
            is_over.set()


class _Stream:
    """When its session is over, the application sees a client that left."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_answering = False
        self.is_over = asyncio.Event()

    async def receive(self) -> Message:
        heard = asyncio.ensure_future(self._receive())
        over = asyncio.ensure_future(self.is_over.wait())
        try:
            await asyncio.wait([heard, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            heard.cancel()
            over.cancel()
        return {"type": "http.disconnect"} if self.is_over.is_set() else heard.result()

    async def send(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        self._is_answering = is_start or message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        if self._is_answering and self.is_over.is_set():
            await self.send({"type": "http.response.body", "body": b""})
