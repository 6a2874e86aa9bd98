"""Connections to what listens on a node, through the agent and its link: no ssh of their own.

``NodeStream`` is one connection, used like a socket. ``Tunnel`` listens on a loopback port of this machine and forwards
every connection, as ``ssh -L`` does.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ugro.client.http import PIECEWISE, AgentGone, Connection
from ugro.kernel.links.operations import OpenTunnel
from ugro.kernel.support.errors import TimedOut, UgroError, Unreachable, UsageError, error_from_wire
from ugro.node import wire

if TYPE_CHECKING:
    from ugro.client.client import Client

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64  # of one tunnel at once; more wait until another has ended
_TRIES = 3
_OPEN_S = 60.0
_PROBE_S = 1.0
_PAUSE_S = 0.1
_READ = 64 * 1024
_END_S = 5.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Dialer:
    """Connects to one port or socket of a node; from any thread, and also after the agent was replaced."""

    def __init__(
        self, client: Client, node: str, port: int | None = None, *, job: int | None = None, socket: str | None = None
    ) -> None:
        """``socket``: the path of a unix socket in the run directory of the job's attempt that runs on the node."""
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"port {port} is not between 1 and 65535", hint="give the port that listens on the node")
        self._client = client.twin()
        self._lock = threading.Lock()
        self._asked = OpenTunnel(node, port, str(job) if job is not None else None, socket)
        self.name = f"{node}:{port}" if port is not None else f"{node}: {socket} of job {job}"

    def ready(self) -> None:
        """An agent runs, and it is the right one."""
        with self._lock:
            self._client.agent()
            self._client.close()

    def __call__(self) -> NodeStream:
        """Open: what listens there has accepted it. Raises why it has not."""
        for _ in range(_TRIES):
            with contextlib.suppress(AgentGone):
                return self._dialled()
            self.ready()
        return self._dialled()

    def _dialled(self) -> NodeStream:
        connection = self._client.connection()
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(connection.close)
            content = connection.start(*self._asked.to_wire(), timeout_s=_OPEN_S, headers=PIECEWISE)
            connection.set_timeout(None)
            unless_open.pop_all()
        return NodeStream(connection, content, self.name)


class NodeStream:
    """One thread may read while another one writes. Whatever cuts it off is raised, never taken for its end."""

    def __init__(self, connection: Connection, content: Iterator[bytes], name: str) -> None:
        self._connection = connection
        self._content = content
        self._name = name
        self._decoder = wire.Decoder()
        self._pieces: deque[bytes] = deque()
        self._has_all = False
        self._is_over = False
        self._error: UgroError | None = None

    def __enter__(self) -> NodeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def recv(self, most: int = _READ) -> bytes:
        """Some bytes; none when the other end sends no more. Raises what cut it off."""
        while not self._pieces and not self._has_all:
            self._read()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > most:
            self._pieces.appendleft(piece[most:])
        return piece[:most]

    def sendall(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            for start in range(0, len(view), _READ):
                self._connection.send(bytes(view[start : start + _READ]))
        except TimeoutError as error:
            raise TimedOut("nothing was taken in time", subject=self._name) from error
        except OSError as error:
            raise self._error or _cut_off(self._name) from error

    def end(self) -> None:
        """Nothing more is sent; what the other end sends can still be read."""
        with contextlib.suppress(OSError):  # then reading says why
            self._connection.send(b"")

    def wait_closed(self) -> None:
        """Until both sides have ended. Raises what cut it off."""
        while not self._is_over:
            self._read()
        if self._error is not None:
            raise self._error

    def settimeout(self, timeout_s: float | None) -> None:
        """Limits each wait."""
        self._connection.set_timeout(timeout_s)

    def abort(self) -> None:
        """From any thread; those that read and write get an error."""
        self._connection.abort()

    def close(self) -> None:
        """The other end sees an abrupt end unless both sides have ended."""
        self._connection.abort()
        self._connection.close()

    def _read(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            piece = next(self._content, None)
        except AgentGone as error:
            self._fail(_cut_off(self._name), error)
        except UgroError as error:  # by ``settimeout``; it cannot be read any further
            self._fail(TimedOut("nothing arrived in time", subject=self._name), error)
        if piece is None:
            self._fail(_cut_off(self._name))
        for kind, _, payload in self._decoder.feed(piece):
            self._take(kind, payload)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == wire.OUT and payload:
            self._pieces.append(payload)
        elif kind == wire.OUT:
            self._has_all = True
        elif kind == wire.RESULT:
            self._has_all = self._is_over = True
        elif kind == wire.ERROR:
            self._is_over = True
            self._error = error_from_wire(wire.parse(payload))

    def _fail(self, error: UgroError, cause: Exception | None = None) -> NoReturn:
        self._is_over = True
        self._error = error
        raise error from cause


class Tunnel:
    """``with client.tunnel("gpu1", 8265) as local_port:``; connections to that port of this machine go to the node's.

    A connection that fails, or is cut off, is reset; ``problem`` says why the last one was.
    """

    def __init__(self, dial: Dialer, *, local_port: int = 0) -> None:
        self.problem: UgroError | None = None
        self._dial = dial
        self._wanted_port = local_port
        self._listener: socket.socket | None = None
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._live: set[_Forwarded] = set()
        self._threads: set[threading.Thread] = set()

    def __enter__(self) -> int:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> int:
        """The local port. Raises if nothing listens at the other end."""
        self._dial.ready()
        _probe(self._dial)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._wanted_port))
            listener.listen(MOST_CONNECTIONS)
        except (OSError, OverflowError) as error:
            listener.close()
            hint = "leave it out: a free one is chosen"
            raise UsageError(f"local port {self._wanted_port} cannot be used: {error}", hint=hint) from error
        self._listener = listener
        self._start(lambda: self._accept(listener), f"tunnel to {self._dial.name}")
        port: int = listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Cuts off the connections that are left."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        with self._lock:
            live, threads = list(self._live), list(self._threads)
        for one in live:
            one.cut()
        for thread in threads:
            thread.join(_END_S)
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is not None:
            try:
                local, _ = listener.accept()
            except OSError:  # closed; or no descriptor is left, and this one waits for that
                time.sleep(_PAUSE_S if self._listener is not None else 0)
                continue
            self._slots.acquire()
            self._start(partial(self._serve, local), f"connection to {self._dial.name}")

    def _serve(self, local: socket.socket) -> None:
        try:
            self._forward(local, self._dial())
        except UgroError as error:
            self._note(error)
            _reset(local)
        finally:
            self._slots.release()

    def _forward(self, local: socket.socket, stream: NodeStream) -> None:
        one = _Forwarded(local, stream)
        with self._lock:
            self._live.add(one)
        if self._listener is None:
            one.cut()
        try:
            one.run()
        finally:
            with self._lock:
                self._live.discard(one)

    def _note(self, error: UgroError) -> None:
        if self._listener is not None:
            self.problem = error
            log.warning("a connection to %s failed: %s", self._dial.name, error)

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()


class _Forwarded:
    """One local connection and its stream."""

    def __init__(self, local: socket.socket, stream: NodeStream) -> None:
        self._local = local
        self._stream = stream
        self._sender = threading.Thread(target=self._send, name="tunnel: to the node", daemon=True)

    def run(self) -> None:
        """Until both sides have ended. Raises what cut it off."""
        self._local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender.start()
        is_whole = False
        try:
            while piece := self._stream.recv():
                self._local.sendall(piece)
            self._local.shutdown(socket.SHUT_WR)
            self._stream.wait_closed()
            is_whole = True
        except OSError:
            pass  # who connected has left
        finally:
            self.cut()
            self._sender.join()
            if is_whole:
                self._local.close()
            else:
                _reset(self._local)
            self._stream.close()

    def cut(self) -> None:
        """Wakes both threads. Nothing is said to the local end yet: it must not take this for the end of the data."""
        self._stream.abort()
        with contextlib.suppress(OSError):
            self._local.shutdown(socket.SHUT_RD)

    def _send(self) -> None:
        try:
            while piece := self._local.recv(_READ):
                self._stream.sendall(piece)
            self._stream.end()
        except OSError:  # the local end was reset
            self._stream.abort()
        except UgroError:
            pass  # reading says why


def _probe(dial: Dialer) -> None:
    """Raises if nothing listens there: who connects to a local port learns only that it was reset."""
    with dial() as stream:
        stream.end()
        stream.settimeout(_PROBE_S)
        with contextlib.suppress(UgroError):  # the server need not close: it was there
            stream.wait_closed()


def _reset(local: socket.socket) -> None:
    with contextlib.suppress(OSError):
        local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    local.close()


def _cut_off(name: str) -> Unreachable:
    return Unreachable("the connection was cut off", subject=name, cause="closed", hint="see: ugro agent status")
