"""Ending all processes of a run: SIGTERM or what its ranks want, grace, SIGKILL, until two looks in a row find none.

A step at a time, so that the caller can watch logs and orders meanwhile. Processes are looked for again at each step;
which ones are the run's, a ``Family`` says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ugro.node.machine import machine_id
from ugro.node.process import process_tree
from ugro.node.process.cgroup import SUPERVISORS_OWN, UNIT_PREFIX

LIMIT_S = 30.0  # after SIGKILL; what is left then hangs in the kernel
_QUICK_S = 0.01  # between two looks, at first
_SLOW_S = 0.1
QUICK_ROUNDS = 20
_CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")

# Pid → start time: the pair tells a process from a later one with the same pid.
Processes = Dict[int, int]


class Family:
    """The processes of a run, as the process that ends them can tell them. Here: found in a look, and not below us."""

    def __init__(self, find: Callable[[], Processes]) -> None:
        self.find = find

    def is_empty(self) -> bool:
        """Exact where a look is not: every process below a subreaper is below one of its children."""
        return not has_children()

    def kill_quickly(self) -> None:
        """One that forks and ends all the time is gone before a look at /proc is over; this is quicker than it."""


class Ending:
    """``leaders`` are asked first, with a signal of their own choice, and the others once no leader is left: a rank
    that saves its work when it is asked still needs its own children for that."""

    def __init__(
        self,
        family: Family,
        leaders: Callable[[], Processes],
        grace_s: float,
        first_signal: int = signal.SIGTERM,
    ) -> None:
        self._family = family
        self._leaders = leaders
        self._kill_at = time.monotonic() + grace_s
        self._first_signal = first_signal
        self._look_s = _QUICK_S
        self._asked: Set[int] = set()
        self._clean_looks = 0
        self.pause_s = _QUICK_S  # before the next step, at most
        self.left: List[int] = []
        self.found: Set[int] = set()

    def hasten(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def step(self) -> bool:
        """True when it is over: nothing is left, or ``left`` cannot be ended."""
        now = time.monotonic()
        leaders = self._leaders()
        if leaders and now < self._kill_at:
            self._ask(leaders, self._first_signal)
            self.pause_s = self._kill_at - now  # the end of each wakes the caller
            return False
        alive = self._family.find()
        self.found.update(alive)
        is_clean = not alive and self._family.is_empty()
        self._clean_looks = self._clean_looks + 1 if is_clean else 0
        # A look reads all of /proc: quick while most ends happen, then seldom.
        self._look_s = self.pause_s = min(_SLOW_S, self._look_s * 1.2)
        if now < self._kill_at:
            self._ask(alive, signal.SIGTERM)
        else:
            self._family.kill_quickly()
            for pid, started in alive.items():
                send(pid, started, signal.SIGKILL)
        self.left = [] if is_clean else sorted(alive or self.found)
        return self._clean_looks >= 2 or now > self._kill_at + LIMIT_S

    def _ask(self, processes: Processes, signum: int) -> None:
        for pid, started in processes.items():
            if pid not in self._asked:
                self._asked.add(pid)
                send(pid, started, signum)
                send(pid, started, signal.SIGCONT)  # a stopped process cannot act on it


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> List[int]:
    """Of this process. Complete: none goes from the kernel's list before we have waited for it."""
    try:
        with open("/proc/self/task/%d/children" % os.getpid(), "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without it
        return [pid for pid, (parent, _) in _table().items() if parent == os.getpid()]


def kill_child(pid: int) -> None:
    """A child's pid is nobody else's before we have waited for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def below(roots: Iterable[int]) -> Processes:
    """All below these, without them, by one look at /proc."""
    table = _table()
    children: Dict[int, List[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: Processes = {}
    queue = list(roots)
    while queue:
        for pid in children.pop(queue.pop(), ()):
            found[pid] = table[pid][1]
            queue.append(pid)
    return found


def marked(mark: bytes) -> Processes:
    """Those with the mark and all below them, without ourselves."""
    roots = process_tree.marked(mark)
    found = {**with_start(roots), **below(roots)}
    found.pop(os.getpid(), None)
    return found


def in_cgroup(path: Optional[str]) -> Processes:
    """Those in a control group that is the run's own, as ``own_cgroup`` found it, and in the groups below it."""
    is_ours = isinstance(path, str) and path.rpartition("/")[2].startswith(UNIT_PREFIX)
    return in_groups("%s%s" % (root, path) for root in _CGROUP_ROOTS if is_ours)


def in_groups(folders: Iterable[str]) -> Processes:
    """Those in the control groups with these folders, and in the groups below them."""
    found: Set[int] = set()
    for top in folders:
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError, ValueError), open(folder + "/cgroup.procs", encoding="ascii") as file:
                found.update(int(line) for line in file)
    return with_start(found - {os.getpid()})


def writing_in(folder: str) -> Processes:
    """Those that have a file in the folder open for writing."""
    start = os.path.join(folder, "")
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return with_start(pid for pid in pids if pid != os.getpid() and _is_writing_in(pid, start))


def _is_writing_in(pid: int, start: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # ended meanwhile, or another user's
        for name in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink("/proc/%d/fd/%s" % (pid, name)).startswith(start):
                    with open("/proc/%d/fdinfo/%s" % (pid, name), encoding="ascii") as file:
                        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                    if flags & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


def own_cgroup() -> Optional[str]:
    """Our control group, if it is one that was made for a run."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            path = line.rstrip("\n").split(":", 2)[2]
            if path.endswith("/" + SUPERVISORS_OWN):
                path = path.rpartition("/")[0]
            if line.startswith("0::") and path.rpartition("/")[2].startswith(UNIT_PREFIX):
                return path
    return None


class Place(NamedTuple):
    """Zeros where there is no such process."""

    group: int
    session: int
    started: int


def place(pid: int) -> Place:
    fields = _stat(pid)
    return Place(int(fields[2]), int(fields[3]), int(fields[19])) if fields else Place(0, 0, 0)


def start_time(pid: int) -> Optional[int]:
    """In clock ticks since the machine started; None when there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int, started: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == started and not _is_zombie(fields)


def _table() -> Dict[int, Tuple[int, int]]:
    """All that can still run: pid → parent and start time."""
    table: Dict[int, Tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else []
        if fields and not _is_zombie(fields):
            table[int(name)] = (int(fields[1]), int(fields[19]))
    return table


def _is_zombie(fields: List[bytes]) -> bool:
    # One whose first thread has ended looks like a zombie, and its other threads run on.
    return fields[0] == b"Z" and int(fields[17]) <= 1


def _stat(pid: int) -> List[bytes]:
    """From the state on; empty when there is no such process."""
    try:
        fd = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return []
    # The name is in brackets and may hold spaces and brackets itself.
    return text[text.rindex(b")") + 2 :].split(b" ", 20)


def send(pid: int, started: int, signum: int) -> None:
    """Signals that process and no other: the descriptor stays with it even if its pid goes to somebody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # a kernel before 5.3, or already gone
            fd = -1
        try:
            if start_time(pid) == started:
                if fd >= 0:
                    signal.pidfd_send_signal(fd, signum)
                else:
                    os.kill(pid, signum)
        finally:
            if fd >= 0:
                os.close(fd)


def alive(processes: Processes) -> Processes:
    """Those of them that still run, and all below them."""
    roots = {pid: started for pid, started in processes.items() if is_running(pid, started)}
    return {**roots, **below(roots)} if roots else {}


def with_start(pids: Iterable[int]) -> Processes:
    found: Processes = {}
    for pid in pids:
        started = start_time(pid)
        if started is not None:
            found[pid] = started
    return found


# --- process id -------------------------------------------------------------------------------------------------------
# The name of a process, for files that outlive it: its pid, when it started, and its machine.
#
# The machine belongs to it because some have one folder on a file server: there the same pid may be somebody else's.


class ProcessName(NamedTuple):
    pid: int
    started: int
    machine: str

    @classmethod
    def own(cls) -> ProcessName:
        pid = os.getpid()
        return cls(pid, start_time(pid) or 0, machine_id())

    @classmethod
    def parse(cls, text: str) -> ProcessName:
        pid, started, machine = text.split("-", 2)
        return cls(int(pid), int(started), machine)

    def __str__(self) -> str:
        return "%d-%d-%s" % self

    def processes(self) -> Processes:
        """Itself, if it is one of this machine; it may be gone."""
        return {self.pid: self.started} if self.machine == machine_id() else {}

    def is_alive(self) -> bool:
        return any(is_running(pid, started) for pid, started in self.processes().items())

    def is_orphaned(self) -> bool:
        """It was here, and is gone."""
        return self.machine == machine_id() and not self.is_alive()
