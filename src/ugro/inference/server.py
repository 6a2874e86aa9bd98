"""The HTTP server: it listens at once, loads the model meanwhile, and on SIGTERM finishes what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from ugro.core.errors import UgroError
from ugro.inference.api.app import create_app
from ugro.inference.options import Options
from ugro.inference.service import Service

log = logging.getLogger(__name__)
_BACKLOG = 1024
_KEEP_ALIVE_S = 75  # longer than a proxy keeps an idle connection: it should be the one that closes it


class Unlistenable(UgroError):
    """The address cannot be listened on now; another port, or a later start, may do."""


async def serve(options: Options) -> int:
    """Until SIGTERM (0), or until the model fails (1). Raises UgroError if it cannot be loaded."""
    service = Service(options)
    app = create_app(service, _key(options.key_file))
    try:
        listener = _listening(options.host, options.port)
    except Unlistenable as error:
        log.error("error: %s; hint: %s", error, error.hint)
        return 1
    server = _Server(_config(app, options), service)
    # Also after uvicorn has put its own handler away: it raises the signal once more then, which must not kill us.
    signal.signal(signal.SIGTERM, server.handle_exit)
    model = asyncio.create_task(_kept(service, server), name="the model")
    log.info("listening on %s:%d", options.host, listener.getsockname()[1])
    await server.serve([listener])
    service.close()
    if not model.done():
        model.cancel()
        log.info("stopped")
        return 0
    model.result()
    return 1


async def _kept(service: Service, server: uvicorn.Server) -> None:
    """Ends when the model cannot be loaded or has failed; the server ends with it."""
    try:
        await service.run()
        await service.broke.wait()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)


def _config(app: object, options: Options) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.grace_s)),
    )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise Unlistenable(f"cannot listen on {host}:{port}: {reason}", hint="choose another --port") from error
    return listener


def _key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UgroError(f"the key file {path} cannot be read: {error.strerror}") from error
    if not key:
        raise UgroError(f"the key file {path} is empty")
    return key
