"""Access control of the dashboard: a token even on loopback, known host names only, and no changes from other sites.

Every program and every web page on this machine can reach a loopback port. A browser signs in with a link that works
once (``tokens.py``). Strangers get the pages with which they sign in, one answer for all else, and no word about the
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.agent.api.body_limit import BodyLimit
from ugro.agent.api.gate import CALLER
from ugro.agent.api.while_allowed import while_allowed
from ugro.agent.door import CONNECTION, Connection
from ugro.config.dashboard import Dashboard
from ugro.core.identity import Caller
from ugro.core.support.loopback import is_loopback
from ugro.web.streams import Streams
from ugro.web.tokens import Tokens

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
