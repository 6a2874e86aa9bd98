"""The agent's process: one per state directory, ensured by a lock. ``serve`` does the rest."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import logging.handlers
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ugro
from ugro.kernel.agent.model import ServedFile
from ugro.kernel.store.engine import Reserve
from ugro.kernel.support.errors import Damaged, UgroError
from ugro.kernel.support.state_dir import StateDir
from ugro.node import inotify
from ugro.node.machine import has_nothing_left

if TYPE_CHECKING:
    from ugro.kernel.agent.serve import ServeFront


# --- one agent per state directory ------------------------------------------------------------------------------------
# The kernel of the machine holds a lock as long as this process lives.


log = logging.getLogger(__name__)

_WAIT_S = 0.2
_LOOK_S = 1.0
_GONE = inotify.DELETE | inotify.DELETE_SELF | inotify.MOVED_FROM | inotify.MOVE_SELF


class HomeLock:
    """After a crash there is nothing to clean up."""

    def __init__(self, home: StateDir, descriptor: int) -> None:
        self.home = home
        self._descriptor = descriptor

    @classmethod
    def take(cls, home: StateDir) -> HomeLock | None:
        """None: another process has it."""
        descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _WAIT_S
        while not _is_taken_up(descriptor):
            # A client that checks for a running agent holds the lock for a moment.
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "version": ugro.__version__}).encode())
        return cls(home, descriptor)

    def is_lost(self) -> bool:
        """Whether the file is gone or another: then this directory is another agent's, or nobody's."""
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self.home.lock)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that does not answer now says nothing
            return False
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    async def end_when_lost(self) -> None:
        """Ends this process at once if its directory was removed or replaced: its files are another agent's then.

        The kernel reports it in time for most writes; looking now and then finds what it does not report.
        """
        with contextlib.suppress(OSError):  # the kernel has no more watches to give
            watch = inotify.Inotify()
            watch.add(str(self.home.path), _GONE)
            asyncio.get_running_loop().add_reader(watch.fd, self.look, watch)
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self, watch: inotify.Inotify | None = None) -> None:
        """Ends this process if its directory was removed or replaced. Any thread may look."""
        for _ in watch.read() if watch is not None else ():
            pass
        if self.is_lost():
            log.error("%s was removed or replaced: this agent ends; jobs on the nodes keep running", self.home.path)
            os._exit(1)  # nothing is closed: that would write to the paths of another agent


def _is_taken_up(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the log ----------------------------------------------------------------------------------------------------------
# A line is one JSON object, with the ids of the node and the job that it is about. The file is rotated.


_IDS = ("node", "job", "attempt", "cause")
_MAX_BYTES = 5_000_000
_KEPT_FILES = 3


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in _IDS if record.__dict__.get(name) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _DamageOnce(logging.Filter):
    """Every part of the agent meets a damaged state again and again: each says so once, and the log stays readable."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if not any(isinstance(argument, Damaged) for argument in arguments):
            return True
        key = (record.name, record.msg)
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first


class _RotatingFile(logging.handlers.RotatingFileHandler):
    """A faster rotating handler: the library's own formats each line twice and checks the file's type."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            self.stream = self.stream or self._open()
            if os.fstat(self.stream.fileno()).st_size + len(line.encode()) > self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.flush()
        except (OSError, ValueError, TypeError, LookupError):  # a full disk, or arguments that do not match the message
            self.handleError(record)


def configure(path: Path, level: str, *, max_bytes: int = _MAX_BYTES) -> None:
    handler = _RotatingFile(path, maxBytes=max_bytes, backupCount=_KEPT_FILES, encoding="utf-8")
    path.chmod(0o600)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(_DamageOnce())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line per request: changes are logged where they are made.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    logging.captureWarnings(True)


# --- the program ------------------------------------------------------------------------------------------------------


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
    parser = argparse.ArgumentParser(prog="python -m ugro.kernel.agent")
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
    from ugro.kernel.agent.serve import serve

    return serve
