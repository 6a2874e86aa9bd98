"""What holds a run to the cores and the memory that it asked for: control groups where this node lets us make some.

Otherwise its ranks are bound to as many cores, which no other run of ours has if there are enough, and its memory is
bookkeeping only. A limit of a process's address space is no replacement: CUDA reserves far more than it uses, and every
process of a run would have the whole of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from typing import Callable, Dict, List, Optional

from ugro.remote import durable
from ugro.remote.identity import machine_id
from ugro.remote.process import cgroup
from ugro.remote.process.cgroup import CPU, MEMORY, Group, Home
from ugro.remote.runs.enforcement import AFFINITY, enforcement
from ugro.remote.state.rundir import RunDir
from ugro.remote.state.runspec import RunSpec

_REMOVE_S = 0.2  # a process that has ended leaves its group soon after
_entered: List[Dict[str, Home]] = []  # where a process of ours could enter a group: not tried for every run


def chosen(allowed: List[int], free: List[int], count: int) -> List[int]:
    """Of the cores that we may use, those that no other run has; others only where there are not enough."""
    taken = [core for core in allowed if core not in free]
    return sorted((free + taken)[:count])


class RunLimits:
    """Of one run. ``begin`` before its first rank starts, ``end`` after its last process."""

    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self._run = run
        self._cpus = spec.cpus
        self._memory_bytes = spec.memory_bytes
        self._group: Optional[Group] = None
        self._cores: List[int] = []
        self._locks: List[int] = []
        self.held: Dict[str, str] = {}  # how, by what was asked for

    def begin(self) -> Optional[Callable[[], None]]:
        """What a rank's process does before it becomes the program; None: nothing."""
        if self._cpus is None and self._memory_bytes is None:
            return None
        if not self.held:
            homes = cgroup.detect()
            self._begin_group({name: homes[name] for name in self._controllers() if name in homes})
            held = enforcement(self._group.homes if self._group else {}, (), can_bind=True)
            if self._cpus is not None and held["cpus"] == AFFINITY:
                self._take_cores(self._cpus)
            self.held = {key: held[key] for key, asked in self._asked().items() if asked}
        return self._enter

    @property
    def groups(self) -> List[str]:
        """The folders of its control groups: whatever its ranks start stays in them."""
        return self._group.folders if self._group is not None else []

    def reached_bytes(self) -> Optional[int]:
        """The memory limit, if the kernel has killed a process of the run because of it."""
        return self._memory_bytes if self._group is not None and self._group.oom_kills() else None

    def end(self) -> None:
        group, self._group = self._group, None
        locks, self._locks = self._locks, []
        if group is not None:
            group.remove(_REMOVE_S)  # else it is tidied up later
        for lock in locks:
            os.close(lock)

    def _asked(self) -> Dict[str, bool]:
        return {"cpus": self._cpus is not None, "memory": self._memory_bytes is not None}

    def _controllers(self) -> List[str]:
        asked = self._asked()
        return [name for name, key in ((CPU, "cpus"), (MEMORY, "memory")) if asked[key]]

    def _begin_group(self, homes: Dict[str, Home]) -> None:
        """A node that refuses in the end what it seemed to offer has no limits; the run starts."""
        if not homes:
            return
        cgroup.tidy(homes)
        name = "%s-%08x" % (self._run.name, zlib.crc32(os.fsencode(self._run.path)))
        with contextlib.suppress(OSError):
            group = cgroup.create(name, homes)
            try:
                group.limit(
                    self._cpus if CPU in homes else None,
                    self._memory_bytes if MEMORY in homes else None,
                )
                if homes not in _entered:
                    _try(group)
                    _entered.append(homes)
            except OSError:
                group.remove()
                raise
            self._group = group

    def _take_cores(self, count: int) -> None:
        """Their locks are held as long as the run lives: others choose others."""
        allowed = sorted(os.sched_getaffinity(0))
        folder = os.path.join(self._run.agent.root, ".ugro", "cores@" + machine_id())
        free: List[int] = []
        with contextlib.suppress(OSError):
            durable.make_folder(folder)
            for core in allowed[:]:
                if len(free) < min(count, len(allowed)):
                    free += [core] if self._lock("%s/%d" % (folder, core)) else []
        self._cores = chosen(allowed, free, count)

    def _lock(self, path: str) -> bool:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if durable.lock_within(fd, fcntl.LOCK_EX, 0):
            self._locks.append(fd)
            return True
        os.close(fd)
        return False

    def _enter(self) -> None:
        if self._group is not None:
            self._group.enter()
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def _try(group: Group) -> None:
    """Whether a process can enter it is not seen from its files alone."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            group.enter()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError("the control group cannot be entered")
