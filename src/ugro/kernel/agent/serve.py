"""Runs the agent, serves its API on a socket that only its user can open, and shuts down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ugro
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.main import HomeLock
from ugro.kernel.agent.model import ServedFile
from ugro.kernel.support.aio import keep_running
from ugro.kernel.support.process import raise_limit
from ugro.kernel.support.state_dir import StateDir

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ugro.kernel.agent.main import Ready
    from ugro.kernel.operations.app import Server

    ServeFront = Callable[[Agent, FastAPI], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)

# While the API is loading, messages from nodes must not wait for Python's usual 5 ms each time.
_SWITCH_S = 0.0003
# Thousands of jobs make many objects and few cycles: Python's usual thresholds look for them 20 times as often.
_GARBAGE = (10_000, 20, 20)


async def serve(lock: HomeLock, cluster_file: ServedFile, ready: Ready, front: ServeFront | None = None) -> None:
    """Returns when the agent was asked to stop, by its API or by a signal."""
    home = lock.home
    watching = asyncio.create_task(lock.end_when_lost(), name="watch the state directory")
    log.debug("up to %d open files and connections", raise_limit())
    agent = Agent(home, cluster_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.stopping.set)
    def speak() -> None:
        lock.look()
        agent.parts.engine.speak()

    try:
        await agent.start(ready.progress)
        agent.loop_watch.start(speak)
        await _serve_until_stopped(agent, _bind(home), ready, front)
    finally:
        # Removed before the lock is released: a client that finds the socket finds a running agent behind it.
        home.socket.unlink(missing_ok=True)
        agent.loop_watch.stop()
        await agent.close()
        watching.cancel()
        log.info("agent stopped")


async def _serve_until_stopped(
    agent: Agent, listener: socket.socket, ready: Ready, front: ServeFront | None
) -> None:
    async with asyncio.TaskGroup() as group:
        work = [
            group.create_task(agent.parts.engine.run(), name="run jobs"),
            group.create_task(agent.cluster.watch(), name="watch the cluster file"),
            group.create_task(agent.monitoring.run(), name="watch nodes and jobs"),
            group.create_task(keep_running(agent.parts.retention.run), name="remove old jobs"),
            group.create_task(agent.audit.run(), name="write the audit log"),
            group.create_task(agent.tokens.run(), name="note the use of tokens"),
            group.create_task(keep_running(agent.backups.run), name="make backups"),
            group.create_task(keep_running(agent.clock_watch.run), name="watch the clock"),
            group.create_task(keep_running(agent.discovery.run), name="discover nodes"),
            group.create_task(keep_running(agent.sweeps.run), name="run sweeps"),
            group.create_task(keep_running(agent.ray_clusters.run), name="run Ray clusters"),
            group.create_task(keep_running(agent.services.run), name="run services"),
            group.create_task(keep_running(agent.power.run), name="suspend and wake nodes"),
            group.create_task(keep_running(agent.hooks.run), name="call hooks"),
        ]
        # Meanwhile links are being opened, which is mostly waiting for ssh.
        server, api, serve_team = await asyncio.to_thread(_load, agent)
        _listen(agent.home, listener)
        log.info("agent %s serves %s", ugro.__version__, agent.cluster.path or "this machine")
        ready.say({"state": "ready", "pid": os.getpid()})
        group.create_task(server.serve([listener]), name="serve the API")
        group.create_task(serve_team(agent, api), name="serve the team")
        if front is not None:
            group.create_task(front(agent, api), name="dashboard")
        await agent.stopping.wait()
        for task in work:
            task.cancel()
        agent.cancel_all()
        server.should_exit = True


def _load(agent: Agent) -> tuple[Server, FastAPI, ServeFront]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    from ugro.kernel.access.team_server import serve_team
    from ugro.kernel.operations.app import make_server

    made = make_server(agent)
    sys.setswitchinterval(usual_s)
    # Loaded modules are never garbage: searching them would cost a tenth of the start and slow every collection.
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    gc.enable()
    return *made, serve_team


def _bind(home: StateDir) -> socket.socket:
    """Binds under a temporary name. The path may be longer than a socket address allows."""
    folder = os.open(home.path, os.O_RDONLY)
    try:
        fresh = _fresh(home)
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"/proc/self/fd/{folder}/{fresh.name}")
        fresh.chmod(0o600)
    finally:
        os.close(folder)
    return listener


def _listen(home: StateDir, listener: socket.socket) -> None:
    """Makes the socket visible once requests can be answered; until then clients find the lock held, and wait.

    The socket of a dead agent is replaced atomically.
    """
    listener.listen(128)
    _fresh(home).rename(home.socket)


def _fresh(home: StateDir) -> Path:
    return home.path / "agent.sock.new"
