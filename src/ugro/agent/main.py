"""The agent's process: one per state directory, held by a lock, serving on a socket that only its user can open."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

import ugro
from ugro.agent.agent import Agent
from ugro.agent.api import create_app
from ugro.agent.logs import configure
from ugro.core.errors import UgroError
from ugro.core.statedir import StateDir

log = logging.getLogger(__name__)

_GOODBYE_S = 2


def main() -> None:
    arguments = _arguments()
    os.umask(0o077)
    home = StateDir(Path(arguments.home).absolute())
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(home)
    if lock is None:
        _tell(arguments.ready_fd, {"state": "taken"})
        return
    configure(home.log, arguments.log_level)
    try:
        asyncio.run(_serve(home, arguments))
    except UgroError as error:
        log.error("cannot start: %s", error)
        _tell(arguments.ready_fd, {"state": "failed", "error": error.to_wire()})
        sys.exit(error.exit_code)
    finally:
        os.close(lock)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ugro.agent")
    parser.add_argument("--home", required=True)
    parser.add_argument("--cluster")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--ready-fd", type=int, help="where to say that the socket is open, or why not")
    return parser.parse_args()


def _lock(home: StateDir) -> int | None:
    """Held while this process lives, by the kernel: nothing to clean up after a crash."""
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"pid": os.getpid(), "version": ugro.__version__}).encode())
    return descriptor


async def _serve(home: StateDir, arguments: argparse.Namespace) -> None:
    agent = Agent(home, Path(arguments.cluster).absolute() if arguments.cluster else None)
    await agent.start()
    listener = _listen(home)
    server = uvicorn.Server(
        uvicorn.Config(create_app(agent), log_config=None, lifespan="off", timeout_graceful_shutdown=_GOODBYE_S)
    )
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(agent.cluster.watch(), name="watch the cluster file")
            serve = group.create_task(server.serve([listener]), name="serve the API")
            stop = group.create_task(_stop_when_asked(agent, server), name="stop when asked")
            log.info("agent %s serves %s", ugro.__version__, agent.cluster.path or "this machine")
            _tell(arguments.ready_fd, {"state": "ready", "pid": os.getpid()})
            await serve
            watch.cancel()
            stop.cancel()
    finally:
        # Gone before the lock is: whoever finds the socket finds a living agent behind it.
        home.socket.unlink(missing_ok=True)
        await agent.close()
        log.info("agent stopped")


async def _stop_when_asked(agent: Agent, server: uvicorn.Server) -> None:
    await agent.stopping.wait()
    server.should_exit = True


def _listen(home: StateDir) -> socket.socket:
    """A dead agent's socket is replaced in one step; the path may be longer than a socket address allows."""
    folder = os.open(home.path, os.O_RDONLY)
    try:
        fresh = home.path / "agent.sock.new"
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"/proc/self/fd/{folder}/{fresh.name}")
        fresh.chmod(0o600)
        listener.listen(128)
        fresh.rename(home.socket)
    finally:
        os.close(folder)
    return listener


def _tell(descriptor: int | None, message: dict[str, Any]) -> None:
    if descriptor is not None:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
        os.close(descriptor)
