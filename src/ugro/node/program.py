"""The node program's loop: reads frames, runs calls, writes answers. One thread, no work of its own.

It holds no truth: killing it at any time is safe. It ends when its link ends, or when the agent has been silent
for too long, and with it every command that was started over that link.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import time

from ugro.node import machine as disk
from ugro.node import wire

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple, TypeVar

    Callback = Callable[[], None]
    Method = Callable[..., None]  # a call, and the parameters as keywords
    M = TypeVar("M", bound=Method)

# What an agent that grants no more than it reads can never reach, however many calls it makes.
MAX_PENDING = 64 << 20
_ASKER = ("agent", "generation")
_LONGEST_TIMER_S = 24 * 3600.0
_TIMERS_AT_ONCE = 8  # then new input is read: long work is done in such pieces
# What is declared by the modules that were imported so far.
METHODS: Dict[str, Method] = {}
ROUTINE: Set[str] = set()
STANDING: Set[str] = set()


def method(name: str, *, is_routine: bool = False, is_standing: bool = False) -> Callable[[M], M]:
    """Declares a method: its name, and by the function's keywords its parameters. This is the only place that does.

    The agent imports the function to ask for it (``kernel.links.calls.asked``), and sends with the node program which
    module has which method: so the name is written out, in a line of its own. ``is_routine``: agents ask by themselves,
    and nobody would miss it. ``is_standing``: neither is it work, however long it takes.
    """

    def declare(serve: M) -> M:
        serve.__dict__["method"] = name
        METHODS[name] = serve
        if is_standing:
            STANDING.add(name)
        if is_standing or is_routine:
            ROUTINE.add(name)
        return serve

    return declare


class Refused(Exception):
    """A call that cannot be done, in words for the user; ``kind`` is a stable word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Call:
    """One request under way. A call that goes on after its start sets the three hooks."""

    on_cancel: Optional[Callback] = None
    on_credit: Optional[Callable[[int], None]] = None
    on_input: Optional[Callable[[bytes], None]] = None

    def __init__(self, program: Program, number: int) -> None:
        self.program = program
        self.number = number
        self.is_done = False
        self.asker: Dict[str, Any] = {}  # the agent and its generation, where it says so

    def data(self, kind: int, payload: bytes) -> None:
        self.program.send(wire.frame(kind, self.number, payload))

    def finish(self, result: Dict[str, Any]) -> None:
        self._end(wire.RESULT, result)

    def finish_with(self, payload: bytes) -> None:
        """With an answer that is JSON already."""
        if not self.is_done and len(payload) > wire.MAX_PAYLOAD:
            self.fail("answer", "a message of %d bytes is over the limit of %d" % (len(payload), wire.MAX_PAYLOAD))
        elif not self.is_done:
            self.is_done = True
            self.program.calls.pop(self.number, None)
            self.program.send(wire.frame(wire.RESULT, self.number, payload))

    def fail(self, kind: str, text: str) -> None:
        self._end(wire.ERROR, {"kind": kind, "message": text})

    def _end(self, kind: int, value: Dict[str, Any]) -> None:
        if not self.is_done:
            self.is_done = True
            self.program.calls.pop(self.number, None)
            try:
                answer = wire.message(kind, self.number, value)
            except wire.ProtocolError as error:  # ours to send, not the agent's to be cut off for
                answer = wire.message(wire.ERROR, self.number, {"kind": "answer", "message": str(error)})
            self.program.send(answer)


class Program:
    def __init__(self, in_fd: int, out_fd: int, root: str, silence_s: float, node_key: str) -> None:
        self.root = root
        self.node_key = node_key
        self.calls: Dict[int, Call] = {}
        # Calls back with what the GPU sampler reads, within so many seconds; None on a node without GPUs.
        self.read_gpus: Optional[Callable[[Callable[[Dict[str, Any]], None], float], None]] = None
        self.find: Callable[[str], Optional[Method]] = METHODS.get
        self._in_fd = in_fd
        self._out_fd = out_fd
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._is_running = True
        self._decoder = wire.Decoder()
        self._pending = bytearray()
        self._waiting: List[Callback] = []
        self._selector = selectors.DefaultSelector()
        self._timers: List[Tuple[float, int, Callback]] = []
        self._timer_numbers = itertools.count()

    def run(self) -> None:
        os.set_blocking(self._in_fd, False)
        os.set_blocking(self._out_fd, False)
        self.watch(self._in_fd, self._read)
        self._check_silence()
        while self._is_running:
            for key, _ in self._selector.select(self._next_timer_s()):
                callback: Callback = key.data
                callback()
            self._run_timers()

    def stop(self) -> None:
        self._is_running = False

    def watch(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def watch_writable(self, fd: int, callback: Callback) -> None:
        """A descriptor is watched for one thing; who reads and writes watches a duplicate, too."""
        self._selector.register(fd, selectors.EVENT_WRITE, callback)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def after(self, delay_s: float, callback: Callback) -> None:
        # In this order, a NaN becomes 0; one in the heap would let no timer fire again.
        delay_s = min(_LONGEST_TIMER_S, max(0.0, delay_s))
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), callback))

    def send(self, data: bytes) -> None:
        if self._pending:
            self._pending += data
            if len(self._pending) > MAX_PENDING:  # it asks and asks and does not read
                self.stop()
            return
        written = self._write(data)
        if written < len(data):
            self._pending += data[written:]
            self._selector.register(self._out_fd, selectors.EVENT_WRITE, self._flush)

    @property
    def is_clogged(self) -> bool:
        """The link has not taken all that was sent: what is sent now waits behind it."""
        return bool(self._pending)

    def when_clear(self, callback: Callback) -> None:
        """Once, when the link has taken everything."""
        self._waiting.append(callback)

    def _flush(self) -> None:
        del self._pending[: self._write(self._pending)]
        if not self._pending:
            self._selector.unregister(self._out_fd)
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._out_fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # the link is gone; so are we
            self.stop()
            return len(data)

    def _read(self) -> None:
        try:
            data = os.read(self._in_fd, 256 * 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.stop()
            return
        self._heard_at = time.monotonic()
        try:
            for kind, number, payload in self._decoder.feed(data):
                self._receive(kind, number, payload)
        except wire.ProtocolError as error:
            self.send(wire.message(wire.ERROR, 0, {"kind": "protocol", "message": str(error)}))
            self.stop()

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == wire.PING:
            self.send(wire.frame(wire.PONG, number, wire.CLOCK.pack(time.time())))
        elif kind == wire.CALL:
            self._start(number, wire.parse(payload))
        else:
            self._forward(kind, self.calls.get(number), payload)

    def _forward(self, kind: int, call: Optional[Call], payload: bytes) -> None:
        if call is None:  # it ended while this was on its way
            return
        if kind == wire.CANCEL:
            if call.on_cancel:
                call.on_cancel()
        elif kind == wire.INPUT:
            if call.on_input:
                call.on_input(payload)
        elif kind == wire.CREDIT and len(payload) == wire.AMOUNT.size:
            if call.on_credit:
                call.on_credit(wire.AMOUNT.unpack(payload)[0])
        else:
            raise wire.ProtocolError("kind %d is invalid towards a node" % kind)

    def _start(self, number: int, request: Dict[str, Any]) -> None:
        call = Call(self, number)
        name = str(request.get("method"))
        method = self.find(name)
        params = request.get("params")
        if number in self.calls:
            raise wire.ProtocolError("call %d is under way already" % number)
        self.calls[number] = call
        if method is None or not isinstance(params, dict):
            call.fail("usage", "no method %.80r on this node program" % request.get("method"))
            return
        call.asker = {key: params.pop(key) for key in _ASKER if key in params}
        try:
            method(call, **params)
        except Refused as refusal:
            call.fail(refusal.kind, str(refusal))
        except OSError as error:
            call.fail(*disk.refusal(error, self.root))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            call.fail("usage", "%s: bad parameters: %.200s" % (request.get("method"), error))

    def _check_silence(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s >= self._silence_s:
            self.stop()
        else:
            self.after(self._silence_s - silent_s, self._check_silence)

    def _next_timer_s(self) -> Optional[float]:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        for _ in range(_TIMERS_AT_ONCE):
            if not self._timers or self._timers[0][0] > now:
                return
            heapq.heappop(self._timers)[2]()
