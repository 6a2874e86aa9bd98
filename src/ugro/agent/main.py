"""The agent's process: one per state directory, ensured by a lock. ``serve`` does the rest."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.agent.lock import HomeLock
from ugro.agent.log_format import configure
from ugro.core.cluster_file import ServedFile
from ugro.core.errors import UgroError
from ugro.core.support.state_dir import StateDir
from ugro.remote.disk import has_nothing_left
from ugro.store.reserve import Reserve

if TYPE_CHECKING:
    from ugro.agent.serve import ServeFront

log = logging.getLogger(__name__)


class Ready:
    """The line that the starting command waits for: that the socket is open, or why not. Others may come before it."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        # Of systemd, if it waits for us. Taken out of the environment: what we start must not speak for us.
        self._notify_socket = os.environ.pop("NOTIFY_SOCKET", "")

    def progress(self, text: str) -> None:
        """What the start takes its time with."""
        if self._descriptor is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, json.dumps({"state": "starting", "text": text}).encode() + b"\n")

    def say(self, message: dict[str, Any]) -> None:
        """Sends the first answer only. The command that waited may be gone, which is no error."""
        if self._notify_socket and message["state"] == "ready":
            _notify(self._notify_socket, b"READY=1")
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            log.info("the command that started this agent is gone")
        os.close(self._descriptor)
        self._descriptor = None


def _notify(address: str, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(message, f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            log.warning("systemd cannot be told that the agent is ready: %s", error)


def main(front: ServeFront | None = None) -> None:
    """``front`` serves the dashboard, which this layer does not import."""
    arguments = _arguments()
    os.umask(0o077)
    home = StateDir(Path(arguments.home).absolute())
    ready = Ready(arguments.ready_fd)
    try:
        _run(home, arguments, ready, front)
    except UgroError as error:
        log.error("the agent stops: %s", error)
        ready.say({"state": "failed", "error": error.to_wire()})
        sys.exit(error.exit_code)
    except OSError as error:
        log.exception("the agent stops")
        ready.say({"state": "failed", "error": home.unusable(error).to_wire()})
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ugro.agent")
    parser.add_argument("--home", required=True)
    parser.add_argument("--cluster")
    parser.add_argument("--found", action="store_true", help="the file was found, not named: it must be allowed")
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help="rather use the file that the last agent served"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--ready-fd", type=int, help="where to say that the socket is open, or why not")
    return parser.parse_args()


def _run(home: StateDir, arguments: argparse.Namespace, ready: Ready, front: ServeFront | None) -> None:
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if has_nothing_left(str(home.path)):
        Reserve(home.reserve).give()
    if (lock := HomeLock.take(home)) is None:
        ready.say({"state": "taken"})
        sys.stderr.write(f"taken: another agent runs in {home.path}\n")
        return
    configure(home.log, arguments.log_level)
    serve = _import_the_rest()
    asyncio.run(serve(lock, _cluster_file(home, arguments), ready, front))


def _cluster_file(home: StateDir, arguments: argparse.Namespace) -> ServedFile:
    """After a crash or a reboot, a command in any folder continues with the cluster on which jobs may run."""
    if arguments.continues:
        for link in (home.served_found, home.served_cluster):
            if link.is_file():
                return ServedFile(Path(os.readlink(link)), is_found=link == home.served_found)
    return ServedFile(Path(arguments.cluster).absolute() if arguments.cluster else None, is_found=arguments.found)


def _import_the_rest() -> Callable[[HomeLock, ServedFile, Ready, ServeFront | None], Coroutine[Any, Any, None]]:
    """Loaded after the lock is held: of ten commands that start an agent at once, only one pays for it."""
    gc.disable()  # until all is loaded
    from ugro.agent.serve import serve

    return serve
