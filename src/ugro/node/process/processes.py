"""The processes below this one, and how all of them are ended; whether a port is free; words for the log."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import time

_SUBREAPER = 36


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
