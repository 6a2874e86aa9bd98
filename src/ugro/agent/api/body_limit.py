"""Refuses request bodies that are too large, before they are in memory."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.core.errors import UsageError
from ugro.core.support.codec import dumps
from ugro.core.support.quantity import format_size


class BodyLimit:
    """A middleware: a body of more bytes is answered with 413, by its declared length or where it passes the limit.

    ``streams``: the paths whose bodies are passed on piece by piece, and may be endless.
    """

    def __init__(self, app: ASGIApp, *, most_bytes: int, hint: str, streams: Collection[str] = ()) -> None:
        self._app = app
        self._streams = streams
        self._most = most_bytes
        self._hint = hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or scope["path"] in self._streams:
            await self._app(scope, receive, send)
        elif _declared(scope) > self._most:
            await self._refusal()(scope, receive, send)
        else:
            counted = _Counted(receive, send, self._most)
            await self._app(scope, counted.receive, counted.send)
            if counted.is_too_large and not counted.has_answered:
                await self._refusal()(scope, receive, send)

    def _refusal(self) -> Response:
        error = UsageError(f"request too large (limit {format_size(self._most)})", hint=self._hint)
        return Response(dumps({"error": error.to_wire()}), 413, media_type="application/json")


class _Counted:
    """One request. After too many bytes the application sees a client that left, and its answer is dropped."""

    def __init__(self, receive: Receive, send: Send, most_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left = most_bytes
        self.has_answered = False

    @property
    def is_too_large(self) -> bool:
        return self._left < 0

    async def receive(self) -> Message:
        if self.is_too_large:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return {"type": "http.disconnect"} if self.is_too_large else message

    async def send(self, message: Message) -> None:
        if self.has_answered or not self.is_too_large:
            self.has_answered = True
            await self._send(message)


def _declared(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0
