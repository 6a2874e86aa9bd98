"""Serving: the agent, its API on a socket that only its user can open, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

import ugro
from ugro.agent.agent import Agent
from ugro.agent.api import create_app
from ugro.core.statedir import StateDir

if TYPE_CHECKING:
    from ugro.agent.main import Ready

log = logging.getLogger(__name__)

_GOODBYE_S = 2
ServeFront = Callable[[Agent, FastAPI], Coroutine[Any, Any, None]]


async def serve(home: StateDir, cluster_file: Path | None, ready: Ready, front: ServeFront | None = None) -> None:
    """Returns when the agent was asked to stop, by its API or by a signal."""
    agent = Agent(home, cluster_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.stopping.set)
    try:
        await agent.start()
        listener = _listen(home)
        log.info("agent %s serves %s", ugro.__version__, agent.cluster.path or "this machine")
        ready.say({"state": "ready", "pid": os.getpid()})
        await _serve_until_stopped(agent, listener, front)
    finally:
        # Gone before the lock is: whoever finds the socket finds a living agent behind it.
        home.socket.unlink(missing_ok=True)
        await agent.close()
        log.info("agent stopped")


async def _serve_until_stopped(agent: Agent, listener: socket.socket, front: ServeFront | None) -> None:
    api = create_app(agent)
    server = Server(
        uvicorn.Config(api, log_config=None, lifespan="off", timeout_graceful_shutdown=_GOODBYE_S)
    )
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(agent.cluster.watch(), name="watch the cluster file")
        work = group.create_task(agent.run_jobs(), name="run jobs")
        see = group.create_task(agent.watching.run(), name="watch nodes and jobs")
        group.create_task(server.serve([listener]), name="serve the API")
        if front is not None:
            group.create_task(front(agent, api), name="dashboard")
        await agent.stopping.wait()
        watch.cancel()
        work.cancel()
        see.cancel()
        agent.cancel_all()
        server.should_exit = True


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own raises the signal again when it has stopped serving, and we would end before we are done.
        yield


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
