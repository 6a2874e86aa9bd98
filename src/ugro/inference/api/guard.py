"""Around the application: who may ask, how much, and what is counted. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.inference.metrics import Metrics
from ugro.inference.refusals import error_body

MOST_BYTES = 64 << 20  # a batch of images in base64
_FREE = frozenset({"/health"})
PATHS = frozenset(
    {
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
        *("/generate", "/classify", "/embed", "/predict"),
    }
)


class Guard:
    def __init__(self, app: ASGIApp, metrics: Metrics, key: bytes | None) -> None:
        self._app, self._metrics, self._key = app, metrics, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        began, status = time.monotonic(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        finally:
            if path in PATHS:
                self._metrics.answered(path, status or 499, time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not (scope["path"] in _FREE or self._may(headers.get(b"authorization", b""))):
            answer = JSONResponse(error_body(401, "the API key is missing or wrong", code="invalid_api_key"), 401)
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MOST_BYTES:
            await _too_large(scope, receive, send)
            return
        await self._app(scope, _Limited(receive), send)

    def _may(self, header: bytes) -> bool:
        """Compared in a time that says nothing about the key."""
        if self._key is None:
            return True
        kind, _, given = header.partition(b" ")
        return hmac.compare_digest(given.strip(), self._key) and kind.lower() == b"bearer"


class _Limited:
    """A body without a stated length ends as if its client had gone when it is too large."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        return message if self._read <= MOST_BYTES else {"type": "http.disconnect"}


async def _too_large(scope: Scope, receive: Receive, send: Send) -> None:
    text = f"the body has more than {MOST_BYTES} bytes"
    await JSONResponse(error_body(413, text), 413)(scope, receive, send)
