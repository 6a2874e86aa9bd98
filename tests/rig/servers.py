"""Servers on a loopback port, as something that runs on a node would listen: echo, flood, one that closes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Serve = Callable[[socket.socket], None]


@contextmanager
def serving(serve: Serve, family: int = socket.AF_INET) -> Iterator[int]:
    """The port. Each connection is served by a thread and closed after it; all are cut off in the end."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    listener.listen(128)
    open_ones: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                connection, _ = listener.accept()
                open_ones.append(connection)
                threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        for each in (listener, *open_ones):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *threads):
            thread.join(10)
        listener.close()


def echo(connection: socket.socket) -> None:
    """Ends its side when the other has ended."""
    while piece := connection.recv(65536):
        connection.sendall(piece)


def flood(connection: socket.socket) -> None:
    """Sends without an end, and reads nothing."""
    piece = b"x" * 65536
    while True:
        connection.sendall(piece)


class Recorder:
    """Reads everything, and notes how each connection ended: whole, or cut off."""

    def __init__(self) -> None:
        self.received = 0
        self.ends: list[str] = []

    def __call__(self, connection: socket.socket) -> None:
        try:
            while piece := connection.recv(65536):
                self.received += len(piece)
            self.ends.append("whole")
        except ConnectionError:
            self.ends.append("cut off")
