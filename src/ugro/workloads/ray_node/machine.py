"""The node: private folders, blocks of free ports, the processes below this one, memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import time

from ugro.workloads.ray_node.rules import BLOCK, RefusedError

FIRST_PORT, END_PORT = 10_000, 15_000  # below what UGRO reserves for rendezvous, and what the kernel gives out
_SUBREAPER = 36


# --- folders and ports ---------------------------------------------------------------------------------------------


def base_folder() -> str:
    """Short, because the path of a socket has at most 107 bytes."""
    return f"/tmp/ugro-ray-{os.getuid()}"


def make_folder(path: str) -> None:
    """In the base folder, which nobody else may have made. Another rank that ends may remove that, if it is empty."""
    base = base_folder()
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(base, 0o700)
        try:
            found = os.lstat(base)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise RefusedError(f"{base} is not a private folder of this user; remove it")
            os.mkdir(path, 0o700)
            return
        except FileNotFoundError:
            continue


class Ports:
    """Consecutive blocks of free ports, kept from other ranks on this machine while this process lives.

    By names of sockets without files: like ports, each is there once in a network, and goes with its process.
    """

    def __init__(self, count: int) -> None:
        self._held: list[socket.socket] = []
        self.first = self._take(count)

    def _take(self, count: int) -> int:
        for first in range(FIRST_PORT, END_PORT - count * BLOCK + 1, BLOCK):
            if all(self._claim(block) for block in range(first, first + count * BLOCK, BLOCK)) and all(
                is_free(port) for port in range(first, first + count * BLOCK)
            ):
                return first
            self.release()
        raise RefusedError(f"no {count * BLOCK} free ports in a row between {FIRST_PORT} and {END_PORT - 1}")

    def _claim(self, block: int) -> bool:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._held.append(name)
        try:
            name.bind(f"\0ugro-ray-ports-{block}")
        except OSError:
            return False
        return True

    def release(self) -> None:
        for name in self._held:
            name.close()
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
    """With the base folder, if nothing is left in that."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(base_folder())
