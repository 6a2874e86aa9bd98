"""Ends the whole process tree of a guard: also children that left the group or the session, or ignore SIGTERM.

The caller is a child subreaper, so whatever is orphaned below it becomes its child and is found here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Callable, Dict, List, Set, Tuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> bool:
    return bool(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def descendants(root: int) -> List[int]:
    return _below(root, _processes())


def strangers_below(root: int, is_known: Callable[[int], bool]) -> List[int]:
    """Children of ``root`` outside its session that it does not know, and all below them."""
    processes = _processes()
    own = os.getsid(root)
    found: List[int] = []
    for pid, (parent, session) in processes.items():
        if parent == root and session != own and not is_known(pid):
            found += [pid, *_below(pid, processes)]
    return found


def _below(root: int, processes: Dict[int, Tuple[int, int]]) -> List[int]:
    children: Dict[int, List[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: List[int] = []
    seen: Set[int] = {root}
    queue = [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            if pid not in seen:
                seen.add(pid)
                found.append(pid)
                queue.append(pid)
    return found


def marked(marker: bytes) -> List[int]:
    """The processes of this user whose environment carries the marker."""
    return [pid for pid in _pids() if marker in environment(pid)]


def environment(pid: int) -> List[bytes]:
    """NAME=value, as the process was started with."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as environ:
            return environ.read().split(b"\0")
    except OSError:
        return []  # ended meanwhile, or another user's


def end_descendants(grace_s: float, limit_s: float = 10.0) -> Tuple[List[int], Dict[int, int]]:
    """SIGTERM, grace, SIGKILL, until two scans in a row find nothing.

    Returns what could not be ended, and the wait statuses of the children that were collected on the way.
    """
    own = os.getpid()
    started = time.monotonic()
    clean_scans = 0
    termed: Set[int] = set()
    ended: Dict[int, int] = {}
    while True:
        ended.update(reap())
        alive = descendants(own)
        clean_scans = 0 if alive else clean_scans + 1
        if clean_scans == 2:
            return [], ended
        elapsed = time.monotonic() - started
        if elapsed > grace_s + limit_s:
            return alive, ended
        for pid in alive:
            if elapsed >= grace_s:
                _kill(pid, signal.SIGKILL)
            elif pid not in termed:
                termed.add(pid)
                _kill(pid, signal.SIGTERM)
                _kill(pid, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
        time.sleep(0.01 if elapsed < 0.5 else 0.05)


def kill_all(find: Callable[[], List[int]], limit_s: float = 2.0) -> None:
    """SIGKILL for whatever ``find`` finds, until it finds nothing."""
    deadline = time.monotonic() + limit_s
    seen: Set[int] = set()
    while time.monotonic() < deadline:
        found = find()
        seen.update(found)
        for pid in found:
            _kill(pid, signal.SIGKILL)
        for pid in seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not found:
            return
        time.sleep(0.005)


def reap() -> Dict[int, int]:
    """Collects every child that has ended: pid → wait status."""
    ended: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _pids() -> List[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _processes() -> Dict[int, Tuple[int, int]]:
    """All that can still run: pid → parent and session."""
    found: Dict[int, Tuple[int, int]] = {}
    for pid in _pids():
        try:
            with open("/proc/%d/stat" % pid, "rb") as stat:
                text = stat.read()
        except OSError:
            continue
        # The name is in brackets and may hold spaces and brackets itself.
        fields = text[text.rindex(b")") + 2 :].split(b" ", 18)
        # One whose first thread has ended looks like a zombie, and its other threads run on.
        if fields[0] != b"Z" or int(fields[17]) > 1:
            found[pid] = (int(fields[1]), int(fields[3]))
    return found
