"""Around the application: who may ask, how much, and what is counted. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.telemetry.prometheus_text import Family, Histogram, exposition

# --- metrics ----------------------------------------------------------------------------------------------------------
# What the server counts, as Prometheus' text. Counted from the event loop and from the threads that compute.


PREFIX = "ugro_inference"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Metrics:
    def __init__(self, is_ready: Callable[[], bool] = lambda: False) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._cancelled = 0
        self._tokens: Counter[str] = Counter()
        self._latency: dict[str, Histogram] = {}
        self._batches = Histogram(_SIZES)
        self.waiting: Callable[[], int] = lambda: 0
        self.running: Callable[[], int] = lambda: 0
        self._is_ready = is_ready

    def answered(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            self._latency.setdefault(path, Histogram(_SECONDS)).observe(seconds)

    def gone(self) -> None:
        """A client that did not wait for its answer."""
        with self._lock:
            self._cancelled += 1

    def batch(self, size: int) -> None:
        with self._lock:
            self._batches.observe(size)

    def tokens(self, kind: str, count: int) -> None:
        with self._lock:
            self._tokens[kind] += count

    def text(self) -> str:
        with self._lock:
            return exposition(self._families())

    def _families(self) -> list[Family]:
        requests = Family(f"{PREFIX}_requests_total", "counter", "Requests that were answered, by path and status.")
        errors = Family(f"{PREFIX}_errors_total", "counter", "Requests that were answered with 500 or above, by path.")
        latency = Family(f"{PREFIX}_request_seconds", "histogram", "Time until the end of the answer, by path.")
        for (path, status), count in sorted(self._requests.items()):
            requests.add(count, path=path, status=status)
        for path in sorted(self._latency):
            failed = sum(count for (one, status), count in self._requests.items() if one == path and status >= 500)
            errors.add(failed, path=path)
            latency.add_histogram(self._latency[path], path=path)
        tokens = Family(f"{PREFIX}_tokens_total", "counter", "Tokens that were read (prompt) and written (generated).")
        for kind in ("prompt", "generated"):
            tokens.add(self._tokens[kind], kind=kind)
        batches = Family(f"{PREFIX}_batch_size", "histogram", "How many were computed together, in each step.")
        batches.add_histogram(self._batches)
        gauges = [
            _one("cancelled_total", "counter", "Requests whose client did not wait for the end.", self._cancelled),
            _one("queue", "gauge", "Requests or texts that wait.", self.waiting()),
            _one("running", "gauge", "Requests or texts that are computed.", self.running()),
            _one("ready", "gauge", "1 if the model can answer.", self._is_ready()),
        ]
        return [requests, errors, latency, tokens, batches, *gauges]


def _one(name: str, kind: str, text: str, value: float) -> Family:
    family = Family(f"{PREFIX}_{name}", kind, text)
    family.add(value)
    return family


# --- refusals ---------------------------------------------------------------------------------------------------------
# Why a request is refused, as OpenAI's clients expect it: a status, a sentence, and the parameter it is about.


RETRY_LATER_S = 1


class Refused(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, param=self.param, code=self.code)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> Refused:
    return Refused(400, message, param=param, code=code)


def too_long(prompt: int, wanted: int, context: int) -> Refused:
    text = f"the model's context has {context} tokens; the prompt has {prompt}"
    more = f" and {wanted} new ones are asked for" if prompt < context else ""
    return bad(f"{text}{more}", code="context_length_exceeded")


def queue_full(waiting: int, retry_s: int) -> Refused:
    return Refused(429, f"{waiting} requests wait already; try again later", code="queue_full", retry_s=retry_s)


def not_ready(reason: str) -> Refused:
    return Refused(503, reason, code="not_ready", retry_s=RETRY_LATER_S)


def model_failed(reason: str) -> Refused:
    return Refused(500, f"the model failed: {reason}", code="model_failed")


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")


# --- guard ------------------------------------------------------------------------------------------------------------


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
