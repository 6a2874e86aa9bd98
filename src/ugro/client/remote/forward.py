"""A loopback port of this machine that leads to the dashboard of a master."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from ugro.client.remote.relay import DASHBOARD
from ugro.core.errors import UgroError

if TYPE_CHECKING:
    from ugro.client.remote.link import MasterLink

log = logging.getLogger(__name__)
_BACKLOG = 64


class DashboardForward:
    """``with`` it, print ``url``, and ``serve`` until Ctrl-C."""

    def __init__(self, link: MasterLink, url: str) -> None:
        """``url``: of the dashboard, as it is on the master."""
        self._link = link
        self._there = urlsplit(url)
        self._listener = _listener(self._there.port or 0)

    @property
    def url(self) -> str:
        """The same, on this machine."""
        port = self._listener.getsockname()[1]
        return urlunsplit(self._there._replace(netloc=f"127.0.0.1:{port}"))

    def __enter__(self) -> DashboardForward:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def serve(self) -> None:
        """Until it is interrupted. A connection that fails is closed; the next one may go well."""
        while True:
            local, _ = self._listener.accept()
            try:
                local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._link.carry(local, DASHBOARD)
            except UgroError as error:
                log.warning("a connection to the dashboard failed: %s", error)


def _listener(wanted: int) -> socket.socket:
    """At the same port as there, if that is free: bookmarks stay valid."""
    for port in (wanted, 0):
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.ExitStack() as unless_bound:
            unless_bound.callback(found.close)
            try:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind(("127.0.0.1", port))
                found.listen(_BACKLOG)
            except OSError:
                continue
            unless_bound.pop_all()
            return found
    raise UgroError("no loopback port is free")
