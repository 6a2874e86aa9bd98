"""A link: the open connection to the node program on one node.

Calls run side by side, each with an id. The link ends when its process ends, or when the peer breaks the protocol or
stops answering; every call in progress then fails with the same ``Unreachable``. ``Node`` opens it again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ugro.kernel.links import diagnosis
from ugro.kernel.links import transport as bootstrap
from ugro.kernel.links.calls import Answer, Duplex, Stream
from ugro.kernel.links.model import LinkQuality, Machine, NodeSpec
from ugro.kernel.links.transport import MAX_STDERR, LinkProcess, SshOptions, link_command
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, Unreachable, UsageError
from ugro.kernel.support.moments import boot_clock_s
from ugro.node import program, wire

# --- keepalives -------------------------------------------------------------------------------------------------------
# Says whether the peer answers, after which time, and how far its clock is from ours.


INTERVAL_S = 2.0
# Together with one tick this detects a hung node within 10 s.
SILENCE_S = 8.0
ANSWER_IN_TIME_S = 1.0
_TICK_S = 1.0
_SET_S = 1.0  # a clock that differs by more was set
_REMEMBERED = 30  # one minute of pings


@dataclass(slots=True)
class _Ping:
    number: int
    sent: float
    rtt_s: float | None = None
    offset_s: float | None = None  # of the node's clock from ours
    ours_s: float = 0.0  # of our wall clock from the clock of our boot, at that time


class Keepalive:
    def __init__(
        self,
        send: Callable[[int], None],
        on_silence: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._on_silence = on_silence
        self._clock = clock
        self._pings: deque[_Ping] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._last_answered = 0
        self.revived_at: float | None = None  # when a peer that had been silent last answered again
        self._heard_at = self._clock()
        self._tick_at = self._heard_at
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._heard_at = self._clock()
        self._ping()
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        self._heard_at = self._clock()

    def answered(self, number: int, node_clock: float | None) -> None:
        """Each ping is answered at most once, and in order."""
        if not self._last_answered < number <= self._count:
            raise wire.ProtocolError(f"unexpected answer to ping {number}")
        self._last_answered = number
        now = self._clock()
        for ping in reversed(self._pings):
            if ping.number == number:
                ping.rtt_s = now - ping.sent
                if ping.rtt_s > ANSWER_IN_TIME_S:
                    self.revived_at = now
                if node_clock is not None and math.isfinite(node_clock):
                    self._note_clock(ping, node_clock - (time.time() - ping.rtt_s / 2))
                return

    def _note_clock(self, ping: _Ping, offset_s: float) -> None:
        """If the node's clock was set, what was measured before no longer counts."""
        ping.ours_s = time.time() - boot_clock_s()
        for other in self._pings:
            if other.offset_s is not None and abs(_now_s(other, ping.ours_s) - offset_s) > _SET_S + (ping.rtt_s or 0.0):
                other.offset_s = None
        ping.offset_s = offset_s

    def quality(self) -> LinkQuality:
        answered = [ping for ping in self._pings if ping.rtt_s is not None]
        if not answered:
            return LinkQuality()
        now = self._clock()
        due = [ping for ping in self._pings if ping.rtt_s is not None or now - ping.sent > ANSWER_IN_TIME_S]
        late = sum(1 for ping in due if ping.rtt_s is None or ping.rtt_s > ANSWER_IN_TIME_S)
        # The quickest answer bounds the clock's error best.
        timed = [ping for ping in answered if ping.offset_s is not None]
        best = min(timed, key=lambda ping: ping.rtt_s or 0.0, default=None)
        offset_s = None if best is None else _now_s(best, time.time() - boot_clock_s())
        rtts = [ping.rtt_s for ping in answered[-5:] if ping.rtt_s is not None]
        return LinkQuality(statistics.median(rtts), late / len(due), offset_s)

    def _ping(self) -> None:
        self._count += 1
        self._pings.append(_Ping(self._count, self._clock()))
        self._send(self._count)

    def _schedule(self) -> None:
        self._tick_at = self._clock() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._tick_at > INTERVAL_S:
            # This process was suspended or stopped, not the peer: the peer's time starts again.
            self._heard_at = now
        if now - self._heard_at > SILENCE_S:
            self._on_silence(now - self._heard_at)
            return
        if now - self._pings[-1].sent >= INTERVAL_S - _TICK_S / 10:
            self._ping()
        self._schedule()


def _now_s(ping: _Ping, ours_s: float) -> float:
    """The offset that it measured, from our clock as it is now: that may have been set since."""
    assert ping.offset_s is not None
    by_s = ours_s - ping.ours_s
    return ping.offset_s - by_s if abs(by_s) > _SET_S else ping.offset_s


# --- the link ---------------------------------------------------------------------------------------------------------


# A node program that hears nothing for so long ends itself and its commands: the agent is gone.
NODE_SILENCE_S = 30.0
_EXIT_S = 2.0  # how long a process that closed its output may take to exit
_LOOK_S = 0.005
_MOUTH_S = 1.0
_UNHEARD = 0xFFFFFFFF  # the number of calls whose answers nobody waits for
_MAX_MESSAGE = 2000
_MAX_CAUSE = 40


class Link(asyncio.Protocol):
    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.machine: Machine | None = None  # known once it is open
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[Unreachable] = self._loop.create_future()
        self._process: LinkProcess | None = None
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Answer] = {}
        self._last_number = 0
        self.uses = 0  # calls that somebody wanted, so far
        self._receive: Callable[[bytes], None] = self._receive_greeting
        self._nonce = secrets.token_hex(8)
        self._greeting = bootstrap.Greeting(self._nonce)
        self._was_program_sent = False
        self._decoder = wire.Decoder()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._keepalive = Keepalive(self._ping, self._fall_silent)
        self._is_clear = asyncio.Event()
        self._is_clear.set()
        # Another thread may speak for a loop that stands still: one writes at a time, and none after the end.
        self._mouth = threading.Lock()
        self._is_left = False

    @classmethod
    async def open(cls, spec: NodeSpec, options: SshOptions, *, timeout_s: float, env: dict[str, str]) -> Link:
        link = cls(spec)
        argv = link_command(spec, options)
        try:
            async with asyncio.timeout(timeout_s):
                await link._start(argv, env)
                await asyncio.shield(link._opened)
        except TimeoutError:
            link._lose(diagnosis.connect_timed_out(spec, timeout_s))
        except OSError as error:
            link._lose(diagnosis.cannot_start(spec, argv[0], error))
        except asyncio.CancelledError:
            link.close()
            await link.wait_closed()
            raise
        if link.lost.done():
            await link.wait_closed()
            raise link.lost.result()
        return link

    async def call(self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        # Hot path: a plain timer, because asyncio.timeout costs as much as the rest of the call.
        answer = Answer(self, self._next_number(), self._loop.create_future())
        self._begin(answer, method, params)
        timer = self._loop.call_later(timeout_s, self._give_up, answer, method, timeout_s)
        try:
            return await answer.future
        finally:
            timer.cancel()
            answer.cancel()

    def stream(self, method: str, params: dict[str, Any] | None = None) -> Stream:
        """Starts a call whose output is read piece by piece."""
        stream = Stream(self, self._next_number(), self._loop.create_future())
        self._begin(stream, method, params)
        return stream

    def duplex(self, method: str, params: dict[str, Any] | None = None) -> Duplex:
        """Starts a call that is read and written piece by piece."""
        duplex = Duplex(self, self._next_number(), self._loop.create_future())
        self._begin(duplex, method, params)
        return duplex

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _begin(self, call: Answer, method: str, params: dict[str, Any] | None) -> None:
        if self.lost.done():
            # Raised for every call: otherwise each would keep the traceback frames of all before it.
            raise self.lost.result().with_traceback(None)
        try:
            message = wire.message(wire.CALL, call.number, {"method": method, "params": params or {}})
        except wire.ProtocolError as error:
            raise UsageError(f"{method} cannot be called: {error}", subject=self.spec.name) from error
        call.method = method
        self.uses += method not in program.ROUTINE
        self._calls[call.number] = call
        self._write(message)

    def _give_up(self, call: Answer, method: str, timeout_s: float) -> None:
        call.cancel(TimedOut(f"no answer to {method} within {timeout_s:g} s", subject=self.spec.name))

    @property
    def work(self) -> tuple[str, ...]:
        """The methods of the calls under way that somebody would miss."""
        return tuple(call.method for call in self._calls.values() if call.method not in program.STANDING)

    @property
    def quality(self) -> LinkQuality:
        return self._keepalive.quality()

    @property
    def revived_at(self) -> float | None:
        return self._keepalive.revived_at

    def close(self) -> None:
        self._lose(Unreachable("the link was closed", subject=self.spec.name, cause="closed"))

    async def wait_closed(self) -> None:
        """Waits until the process of a lost link has exited."""
        if self._process is not None:
            await asyncio.wait([self._process.is_gone], timeout=_EXIT_S)

    # --- the process -------------------------------------------------------------------------------------------

    async def _start(self, argv: list[str], env: dict[str, str]) -> None:
        self._process = LinkProcess(argv, env, self._flooded)
        await self._loop.create_unix_connection(lambda: self, sock=self._process.socket)
        self._write(bootstrap.first_lines(self.spec, self._nonce, NODE_SILENCE_S))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._keepalive.heard()
        try:
            self._receive(data)
        except wire.ProtocolError as error:
            self._lose(diagnosis.broke_protocol(self.spec, str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        with self._mouth:
            self._is_left = True
        if not self.lost.done():
            self._look_for_exit(self._loop.time() + _EXIT_S)

    def _look_for_exit(self, deadline: float) -> None:
        assert self._process is not None
        exit_code = self._process.exit_code()
        if exit_code is None and self._loop.time() < deadline and not self.lost.done():
            self._loop.call_later(_LOOK_S, self._look_for_exit, deadline)
            return
        complaint = self._process.complaint()
        if self._opened.done():
            self._lose(diagnosis.link_broke(self.spec, complaint))
        else:
            self._lose(diagnosis.from_ssh(self.spec, exit_code, complaint, self._greeting.last_line))

    def _flooded(self) -> None:
        self._lose(diagnosis.broke_protocol(self.spec, f"more than {MAX_STDERR >> 20} MiB on standard error"))

    def _lose(self, reason: Unreachable) -> None:
        """The only way a link ends. Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        with self._mouth:
            self._is_left = True
        self._keepalive.stop()
        if not self._opened.done():
            self._opened.set_result(None)
        if self._transport is not None:
            self._transport.abort()
        elif self._process is not None:
            self._process.socket.close()
        if self._process is not None:
            self._process.end()
        self._is_clear.set()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(reason)

    # --- receiving ---------------------------------------------------------------------------------------------

    def _receive_greeting(self, data: bytes) -> None:
        for said in self._greeting.feed(data):
            if said == "ready":
                self._receive = self._receive_frames
                self._receive_frames(self._greeting.rest)
                return
            if said != "want":
                self._lose(diagnosis.from_stage(self.spec, said))
                return
            self._send_program()

    def _send_program(self) -> None:
        if self._was_program_sent:
            raise wire.ProtocolError("it asked for the node program twice")
        self._was_program_sent = True
        self._write(bootstrap.node_program().content)

    def _receive_frames(self, data: bytes) -> None:
        for kind, number, payload in self._decoder.feed(data):
            if kind == wire.PONG:
                self._keepalive.answered(number, wire.CLOCK.unpack(payload)[0] if len(payload) == 8 else None)
            elif number == 0:
                self._receive_machine(kind, wire.parse(payload))
            elif (call := self._calls.get(number)) is not None:
                self._receive_for(call, kind, payload)
            elif number > self._last_number and number != _UNHEARD:
                raise wire.ProtocolError(f"answer to unknown call {number}")
            # else: the rest of a call that was cancelled

    def _receive_machine(self, kind: int, value: dict[str, Any]) -> None:
        if kind == wire.ERROR:
            raise wire.ProtocolError(f"it reports: {value.get('message')}")
        if kind != wire.RESULT or self._opened.done():
            raise wire.ProtocolError(f"unexpected frame of kind {kind}")
        try:
            self.machine = decode(Machine, value)
        except DecodeError as error:
            raise wire.ProtocolError(f"invalid machine facts: {error}") from None
        self._opened.set_result(None)
        self._keepalive.start()

    def _receive_for(self, call: Answer, kind: int, payload: bytes) -> None:
        if kind in (wire.OUT, wire.ERR):
            call.feed(kind, payload)
            return
        if kind == wire.CREDIT:
            call.granted(payload)
            return
        if kind not in (wire.RESULT, wire.ERROR):
            raise wire.ProtocolError(f"invalid frame kind {kind} from a node")
        value = wire.parse(payload)
        # Only now: a call that is removed before its answer is parsed would never end.
        del self._calls[call.number]
        if kind == wire.RESULT:
            call.finish(value)
        else:
            message, cause = f"{value.get('message')}"[:_MAX_MESSAGE], f"{value.get('kind')}"[:_MAX_CAUSE]
            call.fail(RemoteFailure(message, subject=self.spec.name, cause=cause))

    # --- sending -----------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.lost.done():
            with self._mouth:
                self._transport.write(data)

    def speak(self, method: str | None = None, params: dict[str, Any] | None = None) -> bool:
        """Sends a call whose answer nobody hears, or a mere sign of life: from another thread, while the loop stands.

        Not in the middle of what the loop has begun to send: then it returns False.
        """
        if self.machine is None or not self._mouth.acquire(timeout=_MOUTH_S):
            return False
        try:
            transport, process = self._transport, self._process
            if self._is_left or transport is None or process is None or transport.get_write_buffer_size():
                return False
            message = wire.frame(wire.CREDIT, _UNHEARD, wire.AMOUNT.pack(0))  # of no call: it says that we are there
            if method is not None:
                message = wire.message(wire.CALL, _UNHEARD, {"method": method, "params": params or {}})
            if process.socket.send(message) == len(message):
                return True
            process.socket.shutdown(socket.SHUT_RDWR)  # half a message: what follows would not be understood
        except OSError:  # it is full, or gone
            pass
        finally:
            self._mouth.release()
        return False

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._write(wire.frame(kind, number, payload))

    async def clear(self) -> None:
        """For those who send much: no more is put into a queue that other calls would wait behind."""
        while not self._is_clear.is_set():  # others who waited may have filled it again
            await self._is_clear.wait()

    def pause_writing(self) -> None:
        self._is_clear.clear()

    def resume_writing(self) -> None:
        self._is_clear.set()

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def _ping(self, number: int) -> None:
        self.send(wire.PING, number)

    def _fall_silent(self, silent_s: float) -> None:
        self._lose(diagnosis.stopped_answering(self.spec, silent_s))
