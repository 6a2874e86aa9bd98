"""A tunnel: one request is one connection to what listens on a node.

Its body is what the client sends, as long as that takes; meanwhile the answer is what comes back, as frames: OUT, an
empty one when the other end has ended its side, and at last RESULT, or ERROR with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ugro.kernel.access.model import AuditEntry, Caller
from ugro.kernel.access.service import AuditLog
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.operations import OpenTunnel
from ugro.kernel.links.tunnels import Tunnels, Wanted
from ugro.kernel.operations.audit_rules import TUNNEL, tunnel_end
from ugro.kernel.operations.audit_trail import DONE, Peer, now
from ugro.kernel.operations.request import answers
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, UgroError, UsageError
from ugro.node import wire

_BEAT_S = 5.0
_TYPE = "application/vnd.ugro.frames"


class TunnelConnections:
    def __init__(self, tunnels: Tunnels, audit: AuditLog) -> None:
        self._tunnels = tunnels
        self._audit = audit

    @answers(OpenTunnel)
    async def connect(self, asked: OpenTunnel, caller: Caller) -> Response:
        if caller.by_token:
            raise NotAllowed("a tunnel needs the agent's socket", hint="use the command line on the master, or by ssh")
        if (asked.port is None) == (asked.job is None or asked.socket is None):
            raise UsageError("a tunnel needs a port, or a job and a socket")
        duplex = await self._tunnels.open(Wanted(asked.node, asked.port, asked.job, asked.socket))
        end = tunnel_end(asked.to_wire()[1].partition("?")[2].encode())
        entry = AuditEntry(now(), caller.user, caller.via, TUNNEL, end, DONE)
        if self._audit.is_first(entry):
            self._audit.note(entry)
        return TunnelResponse(self._tunnels, duplex)


class TunnelResponse(Response):
    def __init__(self, tunnels: Tunnels, duplex: Duplex) -> None:
        self._tunnels = tunnels
        self._duplex = duplex
        self._is_over = False
        self.media_type = _TYPE
        self.status_code = 200
        self.background = None
        self.init_headers(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            down = asyncio.create_task(self._down(send), name="tunnel: from the node")
            up = asyncio.create_task(self._up(receive), name="tunnel: to the node")
            beat = asyncio.create_task(self._beat(send, scope["client"]), name="tunnel: beat")
            work = [down, up, beat]
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tunnels.close(self._duplex)
            for task in work:
                task.cancel()
            if work:
                await asyncio.wait(work)
        for task in work:
            if not task.cancelled():
                task.result()

    async def _up(self, receive: Receive) -> None:
        """Until the client has left."""
        has_ended = False
        while (message := await receive())["type"] == "http.request":
            await self._duplex.send(message.get("body", b""))
            if not message.get("more_body", False) and not has_ended:
                has_ended = True
                self._duplex.end()

    async def _down(self, send: Send) -> None:
        try:
            async for _, payload in self._duplex:
                await send({"type": "http.response.body", "body": wire.frame(wire.OUT, 0, payload), "more_body": True})
            await self._duplex.result()
            last = wire.frame(wire.RESULT, 0, b"{}")
        except UgroError as error:
            last = wire.frame(wire.ERROR, 0, dumps(error.to_wire()).encode())
        self._is_over = True
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _beat(self, send: Send, peer: object) -> None:
        """Until the client is gone. Of one whose bytes nobody takes nothing is read: only a write shows that it is."""
        assert isinstance(peer, Peer)
        while not peer.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await peer.lost.wait()
            if not self._is_over:
                await send({"type": "http.response.body", "body": wire.frame(wire.PING, 0), "more_body": True})
