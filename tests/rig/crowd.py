"""Many connections to a port that say nothing, or too little."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

_SPARE = 200


def may_have(count: int) -> bool:
    """Raises this process's own limit of descriptors, if it may have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + _SPARE <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + _SPARE, hard))
    return count + _SPARE <= hard


class Crowd:
    """Connections to the port of a URL. None of them waits: the queue of the port may be full."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._address = (where.hostname or "", where.port or 0)
        self.sockets: list[socket.socket] = []

    def join(self, count: int) -> None:
        for _ in range(count):
            one = socket.socket()
            self.sockets.append(one)
            one.setblocking(False)
            one.connect_ex(self._address)

    def are_connected(self) -> bool:
        _, writable, _ = select.select([], self.sockets, [], 0)
        return len(writable) == len(self.sockets)

    def say(self, text: bytes) -> None:
        for one in self.sockets:
            with contextlib.suppress(OSError):  # not connected yet, or shown out
                one.send(text)

    def shown_out(self) -> int:
        """How many the server has closed."""
        poll = select.poll()
        for one in self.sockets:
            poll.register(one, select.POLLRDHUP | select.POLLIN)
        return sum(bool(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR)) for _, event in poll.poll(0))

    def leave(self) -> None:
        for one in self.sockets:
            one.close()
        self.sockets.clear()


@contextlib.contextmanager
def crowds(url: str) -> Iterator[Crowd]:
    crowd = Crowd(url)
    try:
        yield crowd
    finally:
        crowd.leave()
