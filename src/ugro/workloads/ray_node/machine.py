"""The node: private folders, blocks of free ports, the processes below this one, memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat

from ugro.workloads.on_node.processes import is_free
from ugro.workloads.ray_node.rules import BLOCK, RefusedError

# Beyond the ports of Ray Client, below what UGRO reserves for rendezvous and what the kernel gives out.
FIRST_PORT, END_PORT = 10_112, 15_000


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
