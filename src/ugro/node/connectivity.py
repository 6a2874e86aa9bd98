"""Whether nodes reach each other: each node listens, and each connects to others, as the ranks of a job will.

It also reports over which network interfaces the connections went.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ugro.node.messages import Connections, Listening, Missed, Reached, Target

_SIOCGIFCONF = 0x8912
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_ENTRY = 40 if struct.calcsize("P") == 8 else 32  # the size of a struct ifreq
_MAX_ADDRESSES = 1024
_BACKLOG = 512
_MAX_LINE = 256


def listen(
    say: Callable[[Listening], None], /, *, ports: Sequence[int], word: str, reply: str, limit_s: float
) -> None:
    """Reports its ports; then tells callers who know the word at which interface they arrived, until it is ended."""
    deadline = time.monotonic() + float(limit_s)
    listeners: List[socket.socket] = []
    taken = []
    for port in map(int, ports):
        try:
            listeners.append(_listener(port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
    say(Listening(tuple(one.getsockname()[1] for one in listeners), tuple(taken), tuple(addresses())))
    _Greeter(listeners, str(word), str(reply)).run(deadline)


def connect(*, targets: Sequence[Dict[str, Any]], connect_s: float, settle_s: float) -> Connections:
    """Tries every address and port of every target at once. Only the right reply counts: anybody may listen there."""
    deadline = time.monotonic() + float(connect_s)
    trials = [
        _Trial(target, address, port)
        for target in (Target(**target) for target in targets)
        for address in target.addresses
        for port in target.ports
    ]
    _try_all(trials, deadline, float(settle_s))
    for trial in trials:
        trial.socket.close()
    return Connections(
        tuple(trial.success for trial in trials if trial.success is not None),
        tuple(trial.failure() for trial in trials if trial.success is None),
    )


def addresses() -> List[str]:
    """The IPv4 address of each interface that is up and not loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address, or has just gone
                flags = struct.unpack_from("H", fcntl.ioctl(query, _SIOCGIFFLAGS, request), 16)[0]
                if flags & _IFF_UP and flags & _IFF_RUNNING and not flags & _IFF_LOOPBACK:
                    found.append(socket.inet_ntoa(fcntl.ioctl(query, _SIOCGIFADDR, request)[20:24]))
    return found


def interface_of(address: str) -> str:
    """Empty if no interface has this address."""
    return next((name for name, own in _interfaces() if own == address), "")


def _interfaces() -> Iterator[Tuple[str, str]]:
    """Every IPv4 address of this machine, including further ones of an interface."""
    entries = array.array("B", bytes(_ENTRY * _MAX_ADDRESSES))
    where, size = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        answer = fcntl.ioctl(query, _SIOCGIFCONF, struct.pack("iP", size, where))
    filled = struct.unpack("iP", answer)[0]
    for start in range(0, filled, _ENTRY):
        label = entries[start : start + 16].tobytes().partition(b"\0")[0].decode("ascii", "replace")
        # A further address may have a label of its own, such as eth0:1.
        yield label.partition(":")[0], socket.inet_ntoa(entries[start + 20 : start + 24].tobytes())


# --- the side that listens --------------------------------------------------------------------------------------


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    # As rank 0 will set it when it listens here: closed connections in TIME_WAIT must not count.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class _Greeter:
    def __init__(self, listeners: List[socket.socket], word: str, reply: str) -> None:
        self._word = word.encode() + b"\n"
        self._reply = reply
        self._selector = selectors.DefaultSelector()
        self._heard: Dict[socket.socket, bytes] = {}
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self, deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed before it was accepted
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._heard[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        part = b""
        with contextlib.suppress(OSError):
            part = connection.recv(_MAX_LINE)
        said = self._heard[connection] = self._heard[connection] + part
        if said == self._word and part:
            own = connection.getsockname()[0]
            with contextlib.suppress(OSError):
                connection.send(("%s %s\n" % (self._reply, interface_of(own))).encode())
        # The other side closes first: the side that does keeps the port in TIME_WAIT for a minute.
        if not part or not self._word.startswith(said):
            self._selector.unregister(connection)
            del self._heard[connection]
            connection.close()


# --- the side that connects -------------------------------------------------------------------------------------


class _Trial:
    def __init__(self, target: Target, address: str, port: int) -> None:
        self.success: Optional[Reached] = None
        self.error: Optional[str] = None
        self.socket = socket.socket()
        self._target, self._address, self._port = target, address, port
        self._heard = b""
        self._connect_s: Optional[float] = None
        self._began = time.monotonic()

    @property
    def key(self) -> Tuple[str, int]:
        return self._target.node, self._port

    @property
    def is_over(self) -> bool:
        return self.success is not None or self.error is not None

    def begin(self) -> None:
        self.socket.setblocking(False)
        number = self.socket.connect_ex((self._address, self._port))
        if number not in (0, errno.EINPROGRESS):
            self._fail(os.strerror(number))

    def go_on(self) -> int:
        """Called when the socket is ready; returns the events to wait for next."""
        try:
            if self._connect_s is None:
                self._greet()
            else:
                self._hear()
        except OSError as error:
            self._fail(error.strerror or str(error))
        return selectors.EVENT_WRITE if self._connect_s is None else selectors.EVENT_READ

    def failure(self) -> Missed:
        error = self.error or "no answer within %.1f s" % (time.monotonic() - self._began)
        return Missed(self._target.node, self._port, self._address, error)

    def _greet(self) -> None:
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._fail(os.strerror(number))
            return
        self._connect_s = time.monotonic() - self._began
        self.socket.send(self._target.word.encode() + b"\n")

    def _hear(self) -> None:
        part = self.socket.recv(_MAX_LINE)
        self._heard += part
        line, end, _ = self._heard.partition(b"\n")
        reply, _, interface = line.decode("ascii", "replace").partition(" ")
        if end and reply == self._target.reply:
            left_by = interface_of(self.socket.getsockname()[0])
            self.success = Reached(*self.key, self._address, left_by, interface, self._connect_s or 0.0)
        elif end or not part or len(self._heard) > _MAX_LINE:
            self._fail("something else answers there")

    def _fail(self, error: str) -> None:
        self.error = error


def _try_all(trials: List[_Trial], deadline: float, settle_s: float) -> None:
    """Returns when all are over. Once every target is reached, addresses that do not answer get ``settle_s`` more."""
    began = time.monotonic()
    selector = selectors.DefaultSelector()
    for trial in trials:
        trial.begin()
        if not trial.is_over:
            selector.register(trial.socket, selectors.EVENT_WRITE, trial)
    wanted = {trial.key for trial in trials}
    reached: set[Tuple[str, int]] = set()
    left_s = deadline - began
    while selector.get_map() and left_s >= 0:
        left_s = deadline - time.monotonic()  # may be negative: what has arrived by then still counts
        for key, _ in selector.select(max(0.0, left_s)):
            trial = key.data
            events = trial.go_on()
            if trial.is_over:
                selector.unregister(trial.socket)
            else:
                selector.modify(trial.socket, events, trial)
            if trial.success is not None and trial.key not in reached:
                reached.add(trial.key)
                if reached == wanted:
                    now = time.monotonic()
                    deadline = min(deadline, now + max(settle_s, now - began))
    selector.close()
