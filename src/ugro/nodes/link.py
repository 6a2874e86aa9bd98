"""A link: our open conversation with the node program on one node.

Calls run side by side, told apart by an id. It is over when its process ends, the peer talks nonsense or falls
silent; then every call under way fails with the same ``Unreachable``. Opening it again is the node's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any, cast

from ugro.core.errors import RemoteFailure, TimedOut, Unreachable
from ugro.core.node import LinkQuality, NodeSpec
from ugro.nodes import bootstrap, diagnosis
from ugro.nodes.calls import Answer, Stream
from ugro.nodes.keepalive import Keepalive
from ugro.nodes.transport import SshOptions, link_command
from ugro.remote import wire

log = logging.getLogger(__name__)

MAX_BANNER = 64 * 1024
# A node program that hears nothing for so long ends itself, and what it runs: its agent is gone.
NODE_SILENCE_S = 30.0


class Link(asyncio.Protocol):
    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.machine: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[Unreachable] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = -1
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._receive: Callable[[bytes], None] = self._receive_greeting
        self._banner = bytearray()
        self._nonce = secrets.token_hex(8)
        self._decoder = wire.Decoder()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._keepalive = Keepalive(self._ping, self._fall_silent)

    @classmethod
    async def open(cls, spec: NodeSpec, options: SshOptions, *, timeout_s: float, env: dict[str, str]) -> Link:
        link = cls(spec)
        try:
            await link._spawn(link_command(spec, options), env)
            link._write(bootstrap.first_lines(spec, link._nonce, NODE_SILENCE_S))
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(link._opened)
        except TimeoutError:
            link._lose(diagnosis.connect_timed_out(spec, timeout_s))
        except asyncio.CancelledError:
            link.close()
            raise
        if link.lost.done():
            raise link.lost.result()
        return link

    async def call(self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        # The hot path: a timer of our own, since asyncio.timeout costs as much as the rest of the call.
        answer = Answer(self, next(self._numbers), self._loop.create_future())
        self._begin(answer, method, params)
        timer = self._loop.call_later(timeout_s, self._give_up, answer, method, timeout_s)
        try:
            return await answer.future
        finally:
            timer.cancel()
            answer.cancel()

    def stream(self, method: str, params: dict[str, Any] | None = None) -> Stream:
        """Starts a call whose output is read piece by piece."""
        stream = Stream(self, next(self._numbers), self._loop.create_future())
        self._begin(stream, method, params)
        return stream

    def _begin(self, call: Answer, method: str, params: dict[str, Any] | None) -> None:
        if self.lost.done():
            raise self.lost.result()
        self._calls[call.number] = call
        self._write(wire.message(wire.CALL, call.number, {"method": method, "params": params or {}}))

    def _give_up(self, call: Answer, method: str, timeout_s: float) -> None:
        call.cancel(TimedOut(f"no answer to {method} within {timeout_s:g} s", subject=self.spec.name))

    @property
    def quality(self) -> LinkQuality:
        return self._keepalive.quality()

    def close(self) -> None:
        self._lose(Unreachable("the link was closed", subject=self.spec.name, cause="closed"))

    # --- the process -------------------------------------------------------------------------------------------

    async def _spawn(self, argv: list[str], env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # Read only after a failure; ssh and a login shell have no need to write more than a few lines.
        self._stderr = os.memfd_create("stderr")
        try:
            self._process = _popen(argv, theirs.fileno(), self._stderr, env)
        except OSError:
            ours.close()
            self._lose(diagnosis.transport_missing(self.spec, argv[0]))
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=ours)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._keepalive.heard()
        try:
            self._receive(data)
        except wire.ProtocolError as error:
            self._lose(diagnosis.spoke_nonsense(self.spec, str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self._loop.create_task(self._explain_end(), name=f"end of link {self.spec.name}")

    async def _explain_end(self) -> None:
        process = self._process
        assert process is not None
        try:
            exit_code: int | None = await asyncio.wait_for(asyncio.to_thread(process.wait, 2), 3)
        except (TimeoutError, subprocess.TimeoutExpired):
            exit_code = None
        if self._opened.done():
            stderr = self._stderr_text()
            self._lose(Unreachable(
                "the link broke" + (f": {stderr.splitlines()[-1]}" if stderr else ""),
                subject=self.spec.name, cause="link-lost", hint="reconnecting by itself",
            ))
        else:
            self._lose(diagnosis.from_ssh(self.spec, exit_code, self._stderr_text()))

    def _stderr_text(self) -> str:
        if self._stderr < 0:
            return ""
        return os.pread(self._stderr, 16 * 1024, 0).decode("utf-8", "replace").strip()

    def _lose(self, reason: Unreachable) -> None:
        """The one way a link ends. Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self._keepalive.stop()
        if not self._opened.done():
            self._opened.set_result(None)
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            _end_process(self._process)
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
        calls, self._calls = self._calls, {}
        for stream in calls.values():
            stream.fail(reason)

    # --- what is heard -----------------------------------------------------------------------------------------

    def _receive_greeting(self, data: bytes) -> None:
        """Skips what rc files print, up to our marker; then answers what the first stage asks for."""
        self._banner += data
        marker = bootstrap.MARKER
        while (start := self._banner.find(marker)) >= 0 and (end := self._banner.find(b"\n", start)) >= 0:
            nonce, _, said = self._banner[start + len(marker) : end].decode("utf-8", "replace").partition(" ")
            del self._banner[: end + 1]
            if nonce in (self._nonce, "none") and self._obey(said.strip()):
                return
        if len(self._banner) > MAX_BANNER:
            raise wire.ProtocolError(f"more than {MAX_BANNER // 1024} KiB came before its greeting")

    def _obey(self, said: str) -> bool:
        """True when what follows is frames."""
        if said == "want":
            self._write(bootstrap.node_program().content)
            return False
        if said != "ready":
            self._lose(diagnosis.from_stage(self.spec, said))
            return True
        self._receive = self._receive_frames
        rest, self._banner = bytes(self._banner), bytearray()
        self._receive_frames(rest)
        return True

    def _receive_frames(self, data: bytes) -> None:
        for kind, number, payload in self._decoder.feed(data):
            if kind == wire.PONG:
                self._keepalive.answered(number, wire.CLOCK.unpack(payload)[0] if len(payload) == 8 else None)
            elif number == 0:
                self._receive_machine(kind, wire.parse(payload))
            elif (stream := self._calls.get(number)) is not None:
                self._receive_for(stream, kind, payload)
            # else: the rest of a call that was cancelled

    def _receive_machine(self, kind: int, value: dict[str, Any]) -> None:
        if kind == wire.ERROR:
            raise wire.ProtocolError(str(value.get("message")))
        self.machine = value
        self._keepalive.start()
        if not self._opened.done():
            self._opened.set_result(None)

    def _receive_for(self, stream: Answer, kind: int, payload: bytes) -> None:
        if kind in (wire.OUT, wire.ERR):
            stream.feed(kind, payload)
            return
        del self._calls[stream.number]
        if kind == wire.RESULT:
            stream.finish(wire.parse(payload))
        elif kind == wire.ERROR:
            value = wire.parse(payload)
            stream.fail(RemoteFailure(str(value.get("message")), subject=self.spec.name))
        else:
            raise wire.ProtocolError(f"kind {kind} makes no sense towards an agent")

    # --- what is said ------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.lost.done():
            self._transport.write(data)

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._write(wire.frame(kind, number, payload))

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def _ping(self, number: int) -> None:
        self.send(wire.PING, number)

    def _fall_silent(self, silent_s: float) -> None:
        self._lose(diagnosis.stopped_answering(self.spec, silent_s))


def _popen(argv: list[str], talk: int, stderr: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=talk, stdout=talk, stderr=stderr, env=env, start_new_session=True)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends ssh and what it started to get there (a jump, a proxy); no state is lost, no zombie left."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 1
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
