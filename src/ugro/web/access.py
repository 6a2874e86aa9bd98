"""Access control of the dashboard: a token even on loopback, known host names only, and no changes from other sites.

Every program and every web page on this machine can reach a loopback port. A browser signs in with a link that works
once. Its cookie is a signed expiry date, so it survives a restart of the agent.
"""

from __future__ import annotations

import hmac
import ipaddress
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

from ugro.config.schema import Dashboard

LINK_LIFETIME_S = 600.0
COOKIE_LIFETIME_S = 30 * 86400
_MOST_LINKS = 100
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD"})
_OPEN_PATHS = ("/static/", "/login")  # these show nothing of the cluster
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
        self._token = _load_or_create(path)
        self._links: dict[str, float] = {}  # by word, until when it may be used

    def link(self, now: float) -> str:
        """A word that lets one browser in, once, within ``LINK_LIFETIME_S``."""
        self._links = {word: until for word, until in self._links.items() if until > now}
        while len(self._links) >= _MOST_LINKS:
            del self._links[next(iter(self._links))]
        word = secrets.token_urlsafe(24)
        self._links[word] = now + LINK_LIFETIME_S
        return word

    def take(self, word: str, now: float) -> bool:
        return self._links.pop(word, 0.0) > now

    def cookie(self, now: float) -> str:
        until = str(int(now + COOKIE_LIFETIME_S))
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


def _load_or_create(path: Path) -> str:
    """The token, readable by its user alone. Deleting the file signs everybody out."""
    try:
        if token := path.read_text(encoding="ascii").strip():
            return token
    except (FileNotFoundError, UnicodeDecodeError):
        pass  # there is none yet, or it is not ours
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may call the dashboard: its tokens, host names and cookie, and whether connections are encrypted."""

    tokens: Tokens
    names: frozenset[str]
    cookie_name: str
    is_encrypted: bool = False


class AccessControl:
    """The outermost middleware: only allowed requests reach the application."""

    def __init__(self, app: ASGIApp, settings: AccessSettings, sign_in_page: Callable[[], Response]) -> None:
        self._app = app
        self._settings = settings
        self._hosts = _LOOPBACK | settings.names
        self._sign_in_page = sign_in_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        guarded = _with_headers(send, is_static=scope["path"].startswith("/static/"))
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        if problem is not None:
            await PlainTextResponse(f"{problem}\n", 403)(scope, receive, guarded)
        elif scope["path"].startswith(_OPEN_PATHS) or self._is_known(headers):
            await self._app(scope, receive, guarded)
        else:
            await self._sign_in_page()(scope, receive, guarded)

    def _problem(self, scope: Scope, headers: Headers) -> str | None:
        host = _name(headers.get("host", ""))
        if host is None or host not in self._hosts:
            # DNS rebinding: a foreign page can point its own name to 127.0.0.1, but the browser still sends that name.
            return "unknown host name; allow it with dashboard.names in the cluster file"
        is_reading = scope["method"] in _READING
        if is_reading and scope["path"] != "/live":
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_foreign = site not in (None, "same-origin") or (origin is not None and not _is_same(origin, headers))
        # A browser always sends the origin of a change; a program sends its token.
        is_unsigned = not is_reading and site is None and origin is None and "authorization" not in headers
        return "this request came from another site" if is_foreign or is_unsigned else None

    def _is_known(self, headers: Headers) -> bool:
        if (given := headers.get("authorization")) is not None:
            return self._settings.tokens.is_bearer(given)
        cookies: Mapping[str, str] = cookie_parser(headers.get("cookie", ""))
        return self._settings.tokens.is_cookie(cookies.get(self._settings.cookie_name, ""), time.time())


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def may_launch(settings: Dashboard) -> bool:
    """Whether a browser may launch jobs again with changes; on an open address only if its owner said so."""
    return is_loopback(settings.host) if settings.launch is None else settings.launch


def _name(host: str) -> str | None:
    """The host of a Host header. The port is ignored: behind a tunnel it differs."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_same(origin: str, headers: Headers) -> bool:
    return urlsplit(origin).netloc == headers.get("host")


def _with_headers(send: Send, *, is_static: bool) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)  # files of jobs have a stricter policy
            # Browsers revalidate static files, and get 304 if nothing changed.
            headers.setdefault("cache-control", "no-cache" if is_static else "no-store")
        await send(message)

    return sending
