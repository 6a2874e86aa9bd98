"""What the dashboard and the HTTPS API share: a listener, a certificate that is tried first, and a server."""

from __future__ import annotations

import errno
import logging
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

from ugro.agent.server import Server

log = logging.getLogger(__name__)

POLL_S = 0.5  # how soon a change of settings is noticed
_SHUTDOWN_GRACE_S = 1
_BACKLOG = 1024  # a client must not wait because a crowd came before it
_LONGEST_HEAD = 32 * 1024


def make_server(app: ASGIApp, certificate_file: str | None, key_file: str | None) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=_LONGEST_HEAD,
            ws="none",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            server_header=False,
            proxy_headers=False,  # else a process on this machine says which address it comes from
            access_log=False,  # its lines would contain sign-in links
            ssl_certfile=certificate_file,
            ssl_keyfile=key_file,
            reset_contextvars=True,  # a request must not inherit the caller of the one before it on its connection
        )
    )


def try_certificate(certificate_file: str | None, key_file: str | None) -> None:
    """Loads the certificate before the server does, so that a missing file is reported."""
    if certificate_file is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate_file, key_file)


def listen(host: str, port: int, *, may_move: bool) -> socket.socket:
    """``may_move``: to another port, if this one is taken."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not may_move:
                raise
            # Another agent, of this user or another, has the port. `ugro dashboard` prints the one in use.
            listener.bind((address[0], 0))
            log.info("port %s is in use; the dashboard uses another", port)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
