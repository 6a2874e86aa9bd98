"""Records each request that changes something or is refused: the one place through which all of them pass."""

from __future__ import annotations

import asyncio
import socket
import struct
from asyncio import Transport
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ugro.kernel.access.model import AuditEntry
from ugro.kernel.access.service import AuditLog
from ugro.kernel.operations.audit_rules import SIGN_IN, Rule, bounded, refusal, refused_look, rule_for, subject
from ugro.kernel.operations.request import ABOUT
from ugro.kernel.support.moments import boot_clock_s

DONE = "done"
REFUSED = "refused"
_WANTED = 428
_PERIOD_S = 3600.0  # in which a process is recorded once for the same look that is refused
_MOST_REQUEST = 64 * 1024  # of a request that is looked into
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
Who = Callable[[Scope], tuple[str, str]]  # the user, and by what


class AuditTrail:
    """``is_stranger``: whether nobody is signed in who asks; known when the request was answered."""

    def __init__(
        self, app: ASGIApp, audit: AuditLog, who: Who, is_stranger: Callable[[Scope], bool] = lambda scope: False
    ) -> None:
        self._app = app
        self._audit = audit
        self._who = who
        self._is_stranger = is_stranger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = rule_for(scope["method"], scope["path"])
        if found is None:
            await self._look(scope, receive, send)
            return
        exchange = _Exchange(*found, receive, send)
        said: list[str] = []
        scope[ABOUT] = said  # as one object: what is between copies the scope
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            about = (bounded(said[0]) or None) if said else exchange.subject
            if not exchange.is_unfinished and about is not None:
                self._note(scope, exchange.rule.action, about, exchange.outcome)

    async def _look(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that changes nothing."""
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._note_look(scope, answer)

    def _note_look(self, scope: Scope, answer: _Answer) -> None:
        """If it was refused."""
        if self._is_stranger(scope):
            if _has_token(scope):
                self._note(scope, SIGN_IN, "by token", REFUSED)
            return
        found = refused_look(scope["method"], scope["path"], scope.get("query_string", b""), answer.status)
        if found is not None:
            entry = self._entry(scope, *found, refusal(answer.status, answer.body))
            now_s = boot_clock_s()
            if self._audit.is_first(entry, int(now_s // _PERIOD_S)):
                self._audit.note_refused(entry, now_s)

    def _entry(self, scope: Scope, action: str, about: str, outcome: str) -> AuditEntry:
        return AuditEntry(now(), *self._who(scope), action, about, outcome)

    def _note(self, scope: Scope, action: str, about: str, outcome: str) -> None:
        entry = self._entry(scope, action, about, outcome)
        if outcome != DONE:
            self._audit.note_refused(entry, boot_clock_s())
        else:
            self._audit.note(entry)


class _Answer:
    """Of an error, with what it says."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.status >= 400 and not self.body:
            self.body = message.get("body", b"")
        await self._send(message)


class _Exchange:
    """A request and its answer, as far as they are needed for an entry."""

    def __init__(self, rule: Rule, named: str, receive: Receive, send: Send) -> None:
        self.rule = rule
        self._named = named
        self._receive = receive
        self._send = send
        self._request = b""
        self._answer = b""
        self._status = 0
        self._has_cookie = False

    async def receive(self) -> Message:
        message = await self._receive()
        if self.rule.fields and message["type"] == "http.request" and len(self._request) < _MOST_REQUEST:
            self._request += message.get("body", b"")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._has_cookie = any(name.lower() == b"set-cookie" for name, _ in message.get("headers", ()))
        elif not self._answer and (self.rule.makes_jobs or self._status >= 400):
            self._answer = message.get("body", b"")
        await self._send(message)

    @property
    def is_unfinished(self) -> bool:
        """A client on another machine has to send something first, and asks again then."""
        return self._status == _WANTED

    @property
    def outcome(self) -> str:
        if self._status == 0:
            return "no answer"
        if self._status >= 400:
            return refusal(self._status, self._answer)
        # A sign-in that fails is answered with the page to sign in.
        return DONE if self.rule.action != SIGN_IN or self._has_cookie else REFUSED

    @property
    def subject(self) -> str | None:
        is_done = 0 < self._status < 400
        found = subject(self.rule, self._named, self._request, self._answer)
        return found if is_done else found or self._named


class Peer(tuple[str, int]):
    """A user and process; ``lost`` is set when the connection is gone, also while nobody reads from it."""

    uid: int
    lost: asyncio.Event


class LocalProtocol(H11Protocol):
    """On the agent's socket, a client's address is its user and process, which the kernel knows."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        pid, uid = credentials(transport.get_extra_info("socket"))
        self.client = peer_of = Peer((f"uid {uid}", pid))  # what it is called takes a look into the user database
        peer_of.uid = uid
        peer_of.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.client, Peer):
            self.client.lost.set()


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The process and the user that have opened a connection to a unix socket, as the kernel says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _has_token(scope: Scope) -> bool:
    return any(name == b"authorization" for name, _ in scope["headers"])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
