"""Who may use the dashboard: a token even on loopback, hosts by which it may be called, and no orders from other sites.

Any program and any page on this machine can reach a loopback port. A browser gets in by a link that works once; what it
keeps is a signed date, which a new agent still knows.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ONCE_S = 600.0
COOKIE_S = 30 * 86400
_MOST_LINKS = 100
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD"})
_OPEN_PATHS = ("/static/", "/login")  # nothing of the cluster is there
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Tokens:
    def __init__(self, path: Path) -> None:
        self._token = _kept(path)
        self._links: dict[str, float] = {}  # until when each may be used

    def link(self, now: float) -> str:
        """A word that lets one browser in, once, and soon."""
        self._links = {word: until for word, until in self._links.items() if until > now}
        while len(self._links) >= _MOST_LINKS:
            del self._links[next(iter(self._links))]
        word = secrets.token_urlsafe(24)
        self._links[word] = now + ONCE_S
        return word

    def take(self, word: str, now: float) -> bool:
        return self._links.pop(word, 0.0) > now

    def cookie(self, now: float) -> str:
        until = str(int(now + COOKIE_S))
        return f"{until}.{self._signature(until)}"

    def is_cookie(self, value: str, now: float) -> bool:
        until, _, signature = value.partition(".")
        is_signed = hmac.compare_digest(signature.encode(), self._signature(until).encode())
        return is_signed and until.isascii() and until.isdigit() and int(until) > now

    def is_bearer(self, value: str) -> bool:
        scheme, _, token = value.partition(" ")
        is_token = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return is_token and scheme.lower() == "bearer"

    def _signature(self, text: str) -> str:
        return hmac.new(self._token.encode(), b"cookie " + text.encode(), "sha256").hexdigest()


def _kept(path: Path) -> str:
    """Made once, readable by its user alone; without the file everybody must come in anew."""
    try:
        if token := path.read_text(encoding="ascii").strip():
            return token
    except (FileNotFoundError, UnicodeDecodeError):
        pass  # none yet, or nobody wrote this
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


@dataclass(frozen=True, slots=True)
class Doors:
    """How a dashboard is reached: the names it may be called by, its cookie, and whether the wire is encrypted."""

    tokens: Tokens
    names: frozenset[str]
    cookie_name: str
    is_encrypted: bool = False


class Gate:
    """The outermost layer: whatever is behind it was asked for by somebody who may."""

    def __init__(self, app: ASGIApp, doors: Doors, stranger: Callable[[], Response]) -> None:
        self._app = app
        self._doors = doors
        self._hosts = _LOOPBACK | doors.names
        self._stranger = stranger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        guarded = _with_headers(send, is_kept=scope["path"].startswith("/static/"))
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        if problem is not None:
            await PlainTextResponse(f"{problem}\n", 403)(scope, receive, guarded)
        elif scope["path"].startswith(_OPEN_PATHS) or self._is_known(headers):
            await self._app(scope, receive, guarded)
        else:
            await self._stranger()(scope, receive, guarded)

    def _problem(self, scope: Scope, headers: Headers) -> str | None:
        host = _name(headers.get("host", ""))
        if host is None or host not in self._hosts:
            # A page elsewhere can make its own name point to 127.0.0.1; it cannot make the browser lie about the name.
            return "this host name is not known here; allow it with dashboard.names in the cluster file"
        is_reading = scope["method"] in _READING
        if is_reading and scope["path"] != "/live":
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_foreign = site not in (None, "same-origin") or (origin is not None and not _is_same(origin, headers))
        # A browser always says where an order comes from; a program says who it is.
        is_unsigned = not is_reading and site is None and origin is None and "authorization" not in headers
        return "this came from another site" if is_foreign or is_unsigned else None

    def _is_known(self, headers: Headers) -> bool:
        if (given := headers.get("authorization")) is not None:
            return self._doors.tokens.is_bearer(given)
        cookies: Mapping[str, str] = cookie_parser(headers.get("cookie", ""))
        return self._doors.tokens.is_cookie(cookies.get(self._doors.cookie_name, ""), time.time())


def _name(host: str) -> str | None:
    """Of a Host header, without its port: behind a tunnel that is another one."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_same(origin: str, headers: Headers) -> bool:
    return urlsplit(origin).netloc == headers.get("host")


def _with_headers(send: Send, *, is_kept: bool) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            # Static files are asked for again, and answered with "as before".
            headers.setdefault("cache-control", "no-cache" if is_kept else "no-store")
        await send(message)

    return sending
