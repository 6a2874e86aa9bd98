"""Many connections over one pair of pipes: a client and a relay, one of these at each end.

The frames are those of the link to a node (``ugro.node.wire``). The client opens a connection (CALL) and learns that
it is open by its first CREDIT, or by ERROR why it is not. Bytes go as INPUT to the relay and as OUT to the client,
never more than the receiver has granted; an empty frame ends one side, CANCEL cuts both. Each connection is a socket at
both ends, so that who uses it sees nothing of this. A reader that stalls stops its own connection and no other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.support.errors import UgroError, Unreachable, error_from_wire
from ugro.kernel.support.moments import boot_clock_s
from ugro.node import wire

MOST_CONNECTIONS = 256
PING_S = 10.0
SILENCE_S = 45.0  # nothing was heard: the other end is gone
OPEN_S = 60.0  # the relay may have to start the agent
_MOST_QUEUED = 1 << 20  # bytes for the pipe; above, nothing is read from connections
_FEW_QUEUED = _MOST_QUEUED // 4
_MOST_UNREAD = 2 * _MOST_QUEUED
_GRANTED_AT_ONCE = wire.WINDOW // 4
_MOST_ABOUT = 4096
_READ = 256 * 1024

About = Mapping[str, Any]  # what a connection is to reach
Opener = Callable[[About], socket.socket]


class LinkLost(Unreachable):
    """The other end is gone, or what it sends cannot be understood."""

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="closed")


@dataclass(slots=True)
class _Channel:
    """One connection. ``credit``: how much may be sent to the other end; ``granted``: how much it may still send."""

    number: int
    socket: socket.socket
    is_open: bool = False
    credit: int = 0
    granted: int = wire.WINDOW
    written: int = 0  # to the socket, and not granted again yet
    pending: bytearray = field(default_factory=bytearray)
    has_read_all: bool = False  # of the socket
    has_end: bool = False  # of what the other end sends
    is_shut: bool = False
    interest: int = 0


@dataclass(slots=True)
class _Opening:
    about: About
    ours: socket.socket | None = None  # to be carried; without it one is made, whose other end is ``socket``
    done: threading.Event = field(default_factory=threading.Event)
    socket: socket.socket | None = None
    error: UgroError | None = None


class Mux:
    """``run`` in a thread of its own, or as the whole program; ``open`` from any thread."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        opener: Opener | None = None,
        heard: bytes = b"",
        silence_s: float = SILENCE_S,
    ) -> None:
        """``opener``: of a relay, which connects; without it this is the client's end, which also sends pings.

        ``heard``: what was read from the pipe already. ``silence_s``: after which the other end is given up.
        """
        self._silence_s = silence_s
        self.problem: str | None = None  # why it is over
        self._read_fd, self._write_fd = read_fd, write_fd
        self._opener = opener
        self._sends = wire.INPUT if opener is None else wire.OUT
        self._takes = wire.OUT if opener is None else wire.INPUT
        self._decoder = wire.Decoder()
        self._out = bytearray()
        self._is_congested = False
        self._writes = False
        self._channels: dict[int, _Channel] = {}
        self._openings: dict[int, _Opening] = {}
        self._last_number = 0
        self._asked: deque[_Opening] = deque()
        self._lock = threading.Lock()
        self._is_over = False
        self._heard = heard
        self._heard_s = self._pinged_s = boot_clock_s()
        self._selector = selectors.PollSelector()
        self._wake_here, self._wake_there = socket.socketpair()

    # --- from any thread ---------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._is_over

    def open(self, about: About, timeout_s: float = OPEN_S) -> socket.socket:
        """A socket to what ``about`` names. Raises why there is none."""
        opening = self._opened(_Opening(about), timeout_s)
        assert opening.socket is not None
        return opening.socket

    def carry(self, ours: socket.socket, about: About, timeout_s: float = OPEN_S) -> None:
        """Joins a socket with what ``about`` names; closes it at the end, also if that cannot be reached."""
        try:
            self._opened(_Opening(about, ours), timeout_s)
        except UgroError:
            ours.close()
            raise

    def _opened(self, opening: _Opening, timeout_s: float) -> _Opening:
        with self._lock:
            if self._is_over:
                raise self._lost()
            self._asked.append(opening)
        self._wake()
        if not opening.done.wait(timeout_s):
            if opening.socket is not None:
                opening.socket.close()
            raise Unreachable(f"no connection within {timeout_s:g} s", cause="hung")
        if opening.error is not None:
            raise opening.error
        return opening

    def stop(self) -> None:
        """Ends ``run``, and with it all connections."""
        with self._lock:
            self.problem = self.problem or "it was closed"
            self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_there.send(b"!", socket.MSG_DONTWAIT)

    def _lost(self) -> LinkLost:
        return LinkLost(self.problem or "the link is closed")

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the other end is gone, or sends nonsense: ``problem`` says which."""
        try:
            for fd in (self._read_fd, self._write_fd):
                os.set_blocking(fd, False)
            self._wake_here.setblocking(False)
            self._selector.register(self._read_fd, selectors.EVENT_READ, self._hear)
            self._selector.register(self._wake_here, selectors.EVENT_READ, self._woken)
            self._feed(self._heard)
            while not self._is_over:
                for key, mask in self._selector.select(min(PING_S, self._silence_s) / 2):
                    if not self._is_over:
                        key.data(mask)
                self._open_asked()
                self._look_at_clock()
        except wire.ProtocolError as error:
            self._end(f"the other end does not speak this protocol: {error}")
        except OSError as error:
            self._end((error.strerror or str(error)).lower())
        finally:
            self._close_all()

    def _end(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem
            self._is_over = True

    def _close_all(self) -> None:
        self._end("it was closed")
        for channel in list(self._channels.values()):
            self._drop(channel)
        for opening in (*self._openings.values(), *self._asked):
            opening.error = self._lost()
            opening.done.set()
        self._selector.close()
        self._wake_here.close()
        self._wake_there.close()

    def _woken(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_here.recv(4096)

    def _look_at_clock(self) -> None:
        now = boot_clock_s()
        if now - self._heard_s > self._silence_s:
            self._end(f"nothing was heard for {now - self._heard_s:.0f} s")
        elif self._opener is None and now - self._pinged_s >= PING_S:
            self._pinged_s = now
            self._say(wire.frame(wire.PING, 0))

    # --- the pipes ---------------------------------------------------------------------------------------------

    def _hear(self, mask: int) -> None:
        try:
            piece = os.read(self._read_fd, _READ)
        except BlockingIOError:
            return
        if not piece:
            self._end("the other end has closed the link")
            return
        self._heard_s = boot_clock_s()
        self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        for kind, number, payload in self._decoder.feed(piece):
            self._take(kind, number, payload)

    def _say(self, frame: bytes) -> None:
        self._out += frame
        self._write_out()
        if len(self._out) > _MOST_UNREAD:  # data stops earlier: these are answers to what comes without end
            raise wire.ProtocolError("it reads nothing")

    def _write_out(self, mask: int = 0) -> None:
        while self._out:
            try:
                count = os.write(self._write_fd, memoryview(self._out)[:_READ])
            except BlockingIOError:
                break
            del self._out[:count]
        self._watch_pipe()
        if self._is_congested != (len(self._out) > (_FEW_QUEUED if self._is_congested else _MOST_QUEUED)):
            self._is_congested = not self._is_congested
            for channel in self._channels.values():
                self._watch(channel)

    def _watch_pipe(self) -> None:
        if self._writes != bool(self._out):
            self._writes = not self._writes
            if self._writes:
                self._selector.register(self._write_fd, selectors.EVENT_WRITE, self._write_out)
            else:
                self._selector.unregister(self._write_fd)

    # --- frames ------------------------------------------------------------------------------------------------

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == wire.PING:
            self._say(wire.frame(wire.PONG, 0))
        elif kind == wire.CALL:
            self._opened_by_peer(number, payload)
        elif kind != wire.PONG:
            self._take_of_channel(kind, number, payload)

    def _take_of_channel(self, kind: int, number: int, payload: bytes) -> None:
        if not 0 < number <= self._last_number:
            raise wire.ProtocolError(f"connection {number} was never opened")
        channel = self._channels.get(number)
        if channel is None:
            return  # closed here while this was on its way
        if kind == self._takes:
            self._receive(channel, payload)
        elif kind == wire.CREDIT:
            self._grant(channel, payload)
        elif kind == wire.ERROR:
            self._refused(channel, payload)
        elif kind == wire.CANCEL:
            self._drop(channel)
        else:
            raise wire.ProtocolError(f"frame of kind {kind}")

    def _receive(self, channel: _Channel, payload: bytes) -> None:
        if channel.has_end or len(payload) > channel.granted:
            raise wire.ProtocolError("more than was granted")
        channel.granted -= len(payload)
        channel.pending += payload
        channel.has_end = not payload
        self._write_socket(channel)

    def _grant(self, channel: _Channel, payload: bytes) -> None:
        if len(payload) != wire.AMOUNT.size:
            raise wire.ProtocolError("no amount")
        amount: int = wire.AMOUNT.unpack(payload)[0]
        if channel.credit + amount > wire.WINDOW:
            raise wire.ProtocolError("more credit than a window")
        channel.credit += amount
        opening = self._openings.pop(channel.number, None)
        if opening is not None:
            channel.is_open = True
            opening.done.set()
        self._watch(channel)

    # --- opening -----------------------------------------------------------------------------------------------

    def _open_asked(self) -> None:
        while self._asked and not self._is_over:
            opening = self._asked.popleft()
            if len(self._channels) >= MOST_CONNECTIONS:
                opening.error = Unreachable(f"{MOST_CONNECTIONS} connections are open, which is the most at once")
                opening.done.set()
                continue
            self._last_number += 1
            if opening.ours is None:
                opening.ours, opening.socket = socket.socketpair()
            self._openings[self._last_number] = opening
            self._add(_Channel(self._last_number, opening.ours))
            self._say(wire.message(wire.CALL, self._last_number, dict(opening.about)))

    def _opened_by_peer(self, number: int, payload: bytes) -> None:
        if self._opener is None or number <= self._last_number or len(payload) > _MOST_ABOUT:
            raise wire.ProtocolError(f"cannot open connection {number}")
        self._last_number = number
        about = wire.parse(payload)
        try:
            if len(self._channels) >= MOST_CONNECTIONS:
                raise Unreachable(f"{MOST_CONNECTIONS} connections are open, which is the most at once")
            channel = _Channel(number, self._opener(about), is_open=True, credit=wire.WINDOW)
        except UgroError as error:
            self._say(wire.message(wire.ERROR, number, error.to_wire()))
            return
        except OSError as error:
            self._say(wire.message(wire.ERROR, number, Unreachable(str(error)).to_wire()))
            return
        self._add(channel)
        self._say(wire.frame(wire.CREDIT, number, wire.AMOUNT.pack(wire.WINDOW)))

    def _refused(self, channel: _Channel, payload: bytes) -> None:
        opening = self._openings.pop(channel.number, None)
        if opening is None:
            raise wire.ProtocolError("an error about an open connection")
        opening.error = error_from_wire(wire.parse(payload))
        if opening.socket is not None:
            opening.socket.close()
        self._drop(channel)
        opening.done.set()

    def _add(self, channel: _Channel) -> None:
        channel.socket.setblocking(False)
        self._channels[channel.number] = channel
        self._watch(channel)

    # --- sockets -----------------------------------------------------------------------------------------------

    def _watch(self, channel: _Channel) -> None:
        can_read = not channel.has_read_all and channel.credit > 0 and not self._is_congested
        wanted = can_read * selectors.EVENT_READ | bool(channel.pending) * selectors.EVENT_WRITE
        if wanted == channel.interest:
            return
        if channel.interest == 0:
            self._selector.register(channel.socket, wanted, lambda mask: self._move(channel, mask))
        elif wanted == 0:
            self._selector.unregister(channel.socket)
        else:
            self._selector.modify(channel.socket, wanted, lambda mask: self._move(channel, mask))
        channel.interest = wanted

    def _move(self, channel: _Channel, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write_socket(channel)
        if mask & selectors.EVENT_READ and channel.number in self._channels:
            self._read_socket(channel)

    def _read_socket(self, channel: _Channel) -> None:
        if self._is_congested or channel.credit <= 0 or channel.has_read_all:
            return
        try:
            piece = channel.socket.recv(min(channel.credit, wire.CHUNK))
        except BlockingIOError:
            return
        except OSError:
            self._cut(channel)
            return
        channel.credit -= len(piece)
        channel.has_read_all = not piece
        self._say(wire.frame(self._sends, channel.number, piece))
        self._settle(channel)

    def _write_socket(self, channel: _Channel) -> None:
        try:
            while channel.pending:
                count = channel.socket.send(channel.pending)
                del channel.pending[:count]
                channel.written += count
        except BlockingIOError:
            pass
        except OSError:  # who reads there has left, and takes no more
            self._cut(channel)
            return
        if channel.written >= _GRANTED_AT_ONCE or (channel.written and not channel.pending):
            self._say(wire.frame(wire.CREDIT, channel.number, wire.AMOUNT.pack(channel.written)))
            channel.granted += channel.written
            channel.written = 0
        self._settle(channel)

    def _settle(self, channel: _Channel) -> None:
        if channel.has_end and not channel.pending and not channel.is_shut:
            channel.is_shut = True
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)
        if channel.is_shut and channel.has_read_all:
            self._drop(channel)
        else:
            self._watch(channel)

    def _cut(self, channel: _Channel) -> None:
        self._say(wire.frame(wire.CANCEL, channel.number))
        self._drop(channel)

    def _drop(self, channel: _Channel) -> None:
        if self._channels.pop(channel.number, None) is None:
            return
        if channel.interest:
            self._selector.unregister(channel.socket)
            channel.interest = 0
        channel.socket.close()
