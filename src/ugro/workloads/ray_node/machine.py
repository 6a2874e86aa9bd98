"""The node: private folders, blocks of free ports, the processes below this one, memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Iterable

from ugro.workloads.ray_node.rules import BLOCK, RefusedError

FIRST_PORT, END_PORT = 10_000, 15_000  # below what UGRO reserves for rendezvous, and what the kernel gives out
_SUBREAPER = 36


# --- folders and ports ---------------------------------------------------------------------------------------------


def base_folder() -> str:
    """Short, because the path of a socket has at most 107 bytes; nobody else may have made it."""
    path = f"/tmp/ugro-ray-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RefusedError(f"{path} is not a private folder of this user; remove it") from None
    return path


class Ports:
    """Consecutive blocks of free ports, kept from other ranks on this machine by locks that this process holds."""

    def __init__(self, base: str, count: int) -> None:
        self._folder = os.path.join(base, "ports")
        os.makedirs(self._folder, 0o700, exist_ok=True)
        self._held: list[int] = []
        self.first = self._take(count)

    def _take(self, count: int) -> int:
        for first in range(FIRST_PORT, END_PORT - count * BLOCK + 1, BLOCK):
            if self._lock(range(first, first + count * BLOCK, BLOCK)):
                if all(is_free(port) for port in range(first, first + count * BLOCK)):
                    return first
                self.release()
        raise RefusedError(f"no {count * BLOCK} free ports in a row between {FIRST_PORT} and {END_PORT - 1}")

    def _lock(self, blocks: Iterable[int]) -> bool:
        for block in blocks:
            descriptor = os.open(os.path.join(self._folder, str(block)), os.O_RDWR | os.O_CREAT, 0o600)
            self._held.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True

    def release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []


def is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True


# --- the processes below us ----------------------------------------------------------------------------------------


def descendants() -> dict[int, tuple[str, str]]:
    """By pid, the name and the state of every process below this one, also of those that left their session."""
    found: dict[int, tuple[int, str, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    text = file.read()
            except OSError:
                continue
            command, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            found[int(name)] = (int(rest[1]), command, rest[0])
    below: dict[int, tuple[str, str]] = {}
    parents = {os.getpid()}
    while parents:
        parents = {pid for pid, (parent, _, _) in found.items() if parent in parents and pid not in below}
        below |= {pid: found[pid][1:] for pid in parents}
    return {pid: one for pid, one in below.items() if one[1] != "Z"}


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_all(grace_s: float) -> None:
    """Returns when no process below this one is left.

    Our children are asked, and what becomes a child of ours because its parent has ended: Ray ends its own processes
    in an order in which they do not wait for each other.
    """
    began, told = time.monotonic(), set[int]()
    while living := descendants():
        is_late = time.monotonic() - began > grace_s
        for pid in living if is_late else children():
            if is_late or pid not in told:
                _signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
                told.add(pid)
        _reap()
        time.sleep(0.05)
    _reap()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def say(text: str) -> None:
    os.write(1, f"ugro: {text}\n".encode())


# --- memory and files ----------------------------------------------------------------------------------------------


def available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def shared_memory() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
