"""A door: accepts connections of others, and keeps them from using up what the agent needs for its jobs.

The dashboard, the HTTPS API and the team's socket have one. Until a request has shown who asks, a connection is a
stranger's: there are few of them, for a short time, and when there is no room the oldest goes. Uvicorn's own limits
apply only after a connection was accepted and has sent a request, so connections are accepted here, one per pass of the
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ugro.kernel.support import process as descriptors
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_size

# --- request bodies that are too large --------------------------------------------------------------------------------
# They are refused before they are in memory.


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


# --- the door ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)
# Anybody can send requests that are no HTTP: they must not be able to fill the log. Failures of ours are errors.
_http_log = logging.getLogger("uvicorn.error.door")
_http_log.setLevel(logging.ERROR)

CONNECTION = "ugro.connection"  # in a request's scope
_PAUSE_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SAID_EVERY_S = 60.0
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
    b"too many connections; try again in a few seconds\n"
)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    connections: int = 400
    of_one_peer: int | None = None  # of them
    of_one_user: int | None = 100  # of them, once a request has shown who asks
    strangers: int = 100
    stranger_s: float = 10.0  # from the connection to a request that shows who asks
    head_s: float = 10.0  # from an answer to the next complete head
    body_s: float = 30.0
    handshake_s: float = 5.0  # of TLS
    streams: Collection[str] = ()  # the paths whose bodies may take any time

    def free_descriptors(self, limit: int) -> int:
        """So many are left to the agent: to its API, its links to nodes and its files."""
        return max(64, limit // 4)


class Connection(H11Protocol):
    """Knows how long it has waited for its client, and whether a request of it was let in."""

    full: ClassVar[bytes] = _FULL  # what those are answered for whom there is no room

    def __init__(self, door: Door, peer: str, descriptor: int) -> None:
        super().__init__(door.config, door.server.server_state, {})
        self.logger = _http_log
        self._door = door
        self.peer = peer
        self.descriptor = descriptor
        self.is_known = False
        self.user: str | None = None  # who is known
        self.is_open = False
        self.began = self.since = time.monotonic()
        self.opening: asyncio.Task[Any] | None = None
        self.app = functools.partial(self._run, self.app)

    @staticmethod
    def peer_of(accepted: socket.socket) -> str:
        """Who is on the other end, as far as that is known before a request."""
        return str(accepted.getpeername()[0])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        self.is_open = True
        super().connection_made(transport)

    def identify(self, user: str | None) -> bool:
        """By its newest request; None: a stranger. False: this user has as many connections as one may have.

        Somebody who has signed out gets a stranger's time again.
        """
        if self.is_known and user is None:
            self.began = time.monotonic()
        self.user = user
        self.is_known = user is not None and self._door.makes_room(self)
        return user is None or self.is_known

    async def _run(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        self.since = time.monotonic()
        await app({**scope, CONNECTION: self}, receive, send)

    @property
    def is_waiting(self) -> bool:
        """For a request, or for the rest of one that was answered early."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()

    def is_overdue(self, limits: DoorLimits, now: float) -> bool:
        if not self.is_known:
            return now - self.began > limits.stranger_s
        if self.is_waiting:
            return now - self.since > limits.head_s
        if self.cycle.scope["path"] in limits.streams:
            return False
        return self.cycle.more_body and now - self.since > limits.body_s

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._door.left(self)

    def end(self) -> None:
        """At once: a client that reads nothing must not delay it."""
        self._door.left(self)
        if self.is_open:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class Door:
    """``what``: its name in the log. ``kind``: of its connections."""

    def __init__(
        self,
        server: uvicorn.Server,
        limits: DoorLimits | None = None,
        *,
        what: str = "the dashboard",
        kind: type[Connection] = Connection,
    ) -> None:
        self.server = server
        self._what = what
        self._kind = kind
        self.config = server.config
        self.limits = limits or DoorLimits()
        self._inside: dict[Connection, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[Any]] = set()
        self._said_at = -_SAID_EVERY_S

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        if not self.config.loaded:
            self.config.load()
        listener.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._accept(listener), name=f"accept connections to {self._what}")
                group.create_task(self._close_overdue(), name=f"close overdue connections to {self._what}")
        finally:
            for task in self._tasks:
                task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # the client left again, or there are no descriptors
                self._say("cannot accept a connection to %s: %s", self._what, error)
                await asyncio.sleep(_PAUSE_S if error.errno in _EXHAUSTED else 0)
                continue
            self._admit(accepted)
            await asyncio.sleep(0)  # one that waits is accepted at once: jobs come first

    def _admit(self, accepted: socket.socket) -> None:
        try:
            peer = self._kind.peer_of(accepted)
        except OSError:  # it has left
            accepted.close()
            return
        # The system gives the lowest number that is free: when one of ours was opened, so many were in use.
        limit, number = descriptors.limit(), accepted.fileno()
        highest = max((number, *(one.descriptor for one in self._inside)))
        is_tight = highest >= limit - self.limits.free_descriptors(limit)
        goes = leaving(list(self._inside), self.limits, peer, is_tight=is_tight)
        if goes is None:
            self._refuse(accepted, "the agent has few descriptors left" if is_tight else "there are too many")
            return
        for one in goes:
            many = "many connections to %s (one from %s): old ones without a request are closed"
            self._say(many, self._what, peer)
            one.end()
        connection = self._kind(self, peer, number)
        self._inside[connection] = None
        connection.opening = asyncio.create_task(self._open(connection, accepted), name="open a connection")
        self._tasks.add(connection.opening)
        connection.opening.add_done_callback(functools.partial(self._opened, connection, accepted))

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = self.limits.handshake_s if self.config.ssl else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self.config.ssl, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            log.debug("a connection to %s failed: %s", self._what, error)

    def _opened(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        """Or not, if it was cancelled, perhaps before it began."""
        self._tasks.discard(task)
        if not connection.is_open:
            self.left(connection)
            accepted.close()

    def makes_room(self, connection: Connection) -> bool:
        """For one more of its user, whom its request has shown: an idle one of theirs goes."""
        others = (one for one in self._inside if one.is_known and one is not connection)
        goes = exceeding([one for one in others if one.user == connection.user], self.limits.of_one_user)
        for one in goes or ():
            one.end()
        return goes is not None

    def left(self, connection: Connection) -> None:
        self._inside.pop(connection, None)

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        self._say("connections to %s are refused: %s", self._what, reason)
        with accepted:
            if self.config.ssl is None:
                with contextlib.suppress(OSError):  # it has left
                    accepted.send(self._kind.full)

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S)
            now = time.monotonic()
            for connection in [one for one in self._inside if one.is_overdue(self.limits, now)]:
                connection.end()

    def _say(self, text: str, *arguments: object) -> None:
        """Now and then only: others must not be able to fill the log."""
        if time.monotonic() - self._said_at >= _SAID_EVERY_S:
            self._said_at = time.monotonic()
            log.warning(text, *arguments)


class Guest(Protocol):
    peer: str
    is_known: bool

    @property
    def is_waiting(self) -> bool: ...


G = TypeVar("G", bound=Guest)


def leaving(inside: Sequence[G], limits: DoorLimits, peer: str = "", *, is_tight: bool = False) -> list[G] | None:
    """Who leaves so that one more of ``peer`` has room, given the oldest first; None: nobody does, there is no room.

    Who has as many as one may have gives way alone. Of strangers, the oldest of the peer that has most leaves. A client
    that was let in opens an idle connection again. ``is_tight``: there is no room for more than are inside.
    """
    own = [one for one in inside if one.peer == peer]
    if limits.of_one_peer is not None and len(own) >= limits.of_one_peer:
        return _idle(own)
    strangers = [one for one in inside if not one.is_known]
    if strangers and (is_tight or len(strangers) >= limits.strangers):
        ((crowd, _),) = Counter(one.peer for one in strangers).most_common(1)
        return [next(one for one in strangers if one.peer == crowd)]
    if not is_tight and len(inside) < limits.connections:
        return []
    return _idle(inside)


def exceeding(own: Sequence[G], most: int | None) -> list[G] | None:
    """Who of one user's leaves so that one more of theirs has room; None: nobody does, there is no room."""
    return [] if most is None or len(own) < most else _idle(own)


def _idle(guests: Sequence[G]) -> list[G] | None:
    idle = next((one for one in guests if one.is_waiting), None)
    return None if idle is None else [idle]
