"""Access control of the dashboard: sessions of browsers, known host names only, and no changes from other sites.

Every program and every web page on this machine can reach a loopback port. A browser signs in with a link that works
once (``Tokens``). Strangers get the pages with which they sign in, one answer for all else, and no word about the
cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.access.gate import CALLER, while_allowed
from ugro.kernel.access.model import Caller, is_loopback
from ugro.kernel.operations.door import CONNECTION, BodyLimit, Connection
from ugro.web.config import Dashboard

# --- streams ----------------------------------------------------------------------------------------------------------
# Live streams by session: a few for each, and they end when the session does.


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


# --- tokens -----------------------------------------------------------------------------------------------------------
# What lets somebody in: links that work once, sessions of browsers, and the token of programs.


log = logging.getLogger(__name__)

LINK_LIFETIME_S = 600.0
COOKIE_LIFETIME_S = 30 * 86400
_CLOCK_S = 86400  # by how much this machine's clock may have been set back since
# Of one user: nobody signs others out, or uses up their links.
MOST_LINKS = 20
MOST_SESSIONS = 50


class Tokens:
    def __init__(self, path: Path) -> None:
        self._token = _load_or_create(path)
        self._links: dict[str, tuple[float, str]] = {}  # by word: until when it may be used, and whose it is
        self.sessions = Sessions(path.with_suffix(".sessions"), self._token)

    def link(self, now: float, user: str = "") -> str:
        """A word that lets one browser in, once, within ``LINK_LIFETIME_S``, as this user; empty: the agent's owner."""
        self._links = {word: one for word, one in self._links.items() if one[0] > now}
        for old in _oldest(self._links, user, MOST_LINKS):
            del self._links[old]
        word = secrets.token_urlsafe(24)
        self._links[word] = (now + LINK_LIFETIME_S, user)
        return word

    def take(self, word: str, now: float) -> str | None:
        """Whose it is; None if it lets nobody in."""
        until, user = self._links.pop(word, (0.0, ""))
        return user if until > now else None

    def is_bearer(self, value: str) -> bool:
        scheme, _, token = value.partition(" ")
        is_token = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return is_token and scheme.lower() == "bearer"


class Sessions:
    """The browsers that are signed in, also after a restart. One that signs out is not in the file any more.

    The file has no cookies: a session's name there is made of its cookie and the token, so that it is of no use
    without either, and a new token ends all sessions.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token
        self._known = _read(path)  # by name: until when, and whose; the oldest first

    def begin(self, now: float, user: str = "") -> str:
        """The cookie of a new session of this user; empty: of the agent's owner."""
        cookie = secrets.token_urlsafe(32)
        kept = {name: one for name, one in self._known.items() if one[0] > now}
        for old in _oldest(kept, user, MOST_SESSIONS):
            del kept[old]
        self._known = kept | {self._name(cookie): (now + COOKIE_LIFETIME_S, user)}
        try:
            self._write()
        except OSError as error:
            log.warning("a browser is signed in only until the agent stops: %s", error)
        return cookie

    def find(self, cookie: str, now: float) -> str | None:
        """The name of the session, if it goes on."""
        name = self._name(cookie)
        # One that ends later than any can was begun by a clock that was wrong.
        is_valid = now < self._known.get(name, (0.0, ""))[0] <= now + COOKIE_LIFETIME_S + _CLOCK_S
        return name if is_valid else None

    def user_of(self, name: str) -> str | None:
        """Whose the session is; empty: the agent's owner's; None: it has ended."""
        return self._known[name][1] if name in self._known else None

    def end(self, name: str) -> None:
        self._known.pop(name, None)
        try:
            self._write()
        except OSError as error:
            # The old file would bring the session back after a restart: rather everybody signs in again.
            log.warning("all browsers are signed out when the agent stops: %s", error)
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _name(self, cookie: str) -> str:
        return hmac.new(self._token.encode(), b"session " + cookie.encode("utf-8", "replace"), "sha256").hexdigest()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        _write_private(fresh, json.dumps(self._known))
        fresh.rename(self._path)


def _oldest(known: Mapping[str, tuple[float, str]], user: str, most: int) -> list[str]:
    """Those of this user that go, so that one more is no more than ``most``."""
    own = [name for name, (_, whose) in known.items() if whose == user]
    return own[: max(0, len(own) - most + 1)]


def _read(path: Path) -> dict[str, tuple[float, str]]:
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}  # nobody has signed in yet, or the file is not ours
    known = found.items() if isinstance(found, dict) else ()
    # A session without a user was begun before there were teams: by the owner.
    entries = [(name, one if isinstance(one, list) else [one, ""]) for name, one in known]
    return {name: (float(one[0]), str(one[1])) for name, one in entries if _is_entry(one)}


def _is_entry(one: list[object]) -> bool:
    return len(one) == 2 and isinstance(one[0], int | float) and isinstance(one[1], str)


def _load_or_create(path: Path) -> str:
    """The token, readable by its user alone. Deleting the file signs everybody out."""
    try:
        if token := path.read_text(encoding="ascii").strip():
            return token
    except (FileNotFoundError, UnicodeDecodeError):
        pass  # there is none yet, or it is not ours
    token = secrets.token_urlsafe(32)
    _write_private(path, token + "\n")
    return token


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


# --- access -----------------------------------------------------------------------------------------------------------


SESSION = "ugro.session"  # in a request's scope: who asks; None is a stranger
LARGEST_BODY = 2 << 20
_LARGEST_BODY_OF_STRANGERS = 4096
PROGRAM = "program"  # the session of those who have the token
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD"})
_SIGN_IN_FILES = frozenset({"/static/ugro.css", "/static/icon.svg", "/static/login.js"})
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


WhoSigned = Callable[[str, str], Awaitable[Caller | None]]  # by a user, and from where


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may call the dashboard: its tokens, host names and cookie, and whether connections are encrypted.

    ``caller`` says what a user (empty: the agent's owner) may do who has signed in from somewhere; None: nothing.
    """

    tokens: Tokens
    names: frozenset[str]
    cookie_name: str
    caller: WhoSigned
    is_encrypted: bool = False
    streams: Streams = field(default_factory=Streams)


class AccessControl:
    """Only allowed requests reach the application."""

    def __init__(self, app: ASGIApp, settings: AccessSettings, sign_in_page: Callable[[], Response]) -> None:
        hint = "use the command line: ugro --help"
        self._app = BodyLimit(app, most_bytes=LARGEST_BODY, hint=hint)
        self._sign_in = BodyLimit(app, most_bytes=_LARGEST_BODY_OF_STRANGERS, hint=hint)
        self._settings = settings
        self._hosts = _LOOPBACK | settings.names
        self._sign_in_page = sign_in_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        guarded = _with_headers(send, is_static=scope["path"].startswith("/static/"))
        headers = Headers(scope=scope)
        session = self._session(headers)
        scope[CALLER] = caller = await self._caller(scope, session)
        session = session if caller is not None else None
        connection: Connection | None = scope.get(CONNECTION)
        if connection is not None and not connection.identify(caller.user if caller is not None else None):
            text = "you have too many connections open; close some tabs, or try again later\n"
            await PlainTextResponse(text, 503, {"connection": "close"})(scope, receive, guarded)
            return
        scope[SESSION] = session
        if caller is not None:
            guarded = while_allowed(guarded, caller, partial(self._caller, scope, session))
        if (problem := self._problem(scope, headers)) is not None:
            await PlainTextResponse(f"{problem}\n", 403)(scope, receive, guarded)
        elif _signs_in(scope):
            await self._sign_in(scope, receive, guarded)
        elif session is None:
            await self._sign_in_page()(scope, receive, guarded)
        elif scope["path"] == "/live":
            await self._settings.streams.serve(session, self._app, scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

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

    def _session(self, headers: Headers) -> str | None:
        tokens = self._settings.tokens
        if (given := headers.get("authorization")) is not None:
            return PROGRAM if tokens.is_bearer(given) else None
        cookies: Mapping[str, str] = cookie_parser(headers.get("cookie", ""))
        return tokens.sessions.find(cookies.get(self._settings.cookie_name, ""), time.time())


    async def _caller(self, scope: Scope, session: str | None) -> Caller | None:
        if session is None:
            return None
        client = scope.get("client")
        address = client[0] if client else "unknown address"
        if session == PROGRAM:
            return await self._settings.caller("", f"dashboard token, {address}")
        # A session's name in the audit log is of no use without its cookie.
        user = self._settings.tokens.sessions.user_of(session)
        if user is None:
            return None
        return await self._settings.caller(user, f"browser, {address}, session {session[:8]}")


def _signs_in(scope: Scope) -> bool:
    """These are for everybody, and only these: they show nothing of the cluster."""
    if scope["path"] == "/login":
        return scope["method"] in ("GET", "POST")
    return scope["path"] in _SIGN_IN_FILES and scope["method"] in _READING


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
    try:
        return urlsplit(origin).netloc == headers.get("host")
    except ValueError:
        return False


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
