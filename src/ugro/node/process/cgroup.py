"""Control groups of our own on this node: a run's limits, and a way to end all that is in one at once.

Where groups can be made: version 2, as root below the root group, or in the scope that systemd made for a supervisor
and delegated to it; version 1, as root below our own group. Elsewhere the kernel does not let us, and nothing here
does anything. A machine may have some controllers in version 1 and others in version 2.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections import namedtuple

from ugro.node.machine import has_user_manager, survival

TYPE_CHECKING = False  # see wire.py

if TYPE_CHECKING:
    from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional


UNIT_PREFIX = "ugro-run-"  # of the group that systemd makes for a supervisor, and of ours among those of others
SUPERVISORS_OWN = "supervisor"  # the group in that one where the supervisor itself is, if others in it have limits
CPU, MEMORY = "cpu", "memory"
KILL = "kill"  # not a controller: every group of version 2 can be ended at once
_NAME = "ugro"
_PERIOD_US = 100_000
_REMOVE_S = 2.0
_PAUSE_S = 0.01
_LEFTOVER_S = 60.0


if TYPE_CHECKING:

    class Home(NamedTuple):
        """Where groups can be made for one controller."""

        version: int
        folder: str
        is_scope: bool = False  # the scope of our own supervisor, which has to leave it for a group inside
else:
    Home = namedtuple("Home", ("version", "folder", "is_scope"), defaults=(False,))


def detect() -> Dict[str, Home]:
    """By controller, and ``KILL``; empty where no groups can be made. Nothing is changed."""
    return homes(read("/proc/self/mountinfo"), read("/proc/self/cgroup"))


def homes(mounts: str, groups: str) -> Dict[str, Home]:
    """``mounts`` and ``groups`` as the kernel tells them in /proc/self/mountinfo and /proc/self/cgroup."""
    own = _own_groups(groups)
    found: Dict[str, Home] = {}
    for kind, root, mount, options in _mounts(mounts):
        if kind == "cgroup2":
            home = _second(mount, _inside(own.get("", "/"), root))
            for name in [KILL, *read(mount + "/cgroup.controllers").split()] if home else []:
                found[name] = home  # type: ignore[assignment]
        else:
            folder = mount + _inside(own.get(_controller(options), "/"), root).rstrip("/")
            if _controller(options) and os.access(folder, os.W_OK):
                found.setdefault(_controller(options), Home(1, folder))
    if found.get(KILL, Home(0, "")).is_scope:  # in a scope, only what was delegated with it
        names = read(found[KILL].folder + "/cgroup.controllers").split()
        found = {name: home for name, home in found.items() if home.version == 1 or name in [KILL, *names]}
    return {name: home for name, home in found.items() if name in (CPU, MEMORY, KILL)}


def _second(mount: str, own: str) -> Optional[Home]:
    scope = own.rpartition("/")[0] if own.endswith("/" + SUPERVISORS_OWN) else own
    if scope.rpartition("/")[2].startswith(UNIT_PREFIX):
        is_ours = os.access(mount + scope + "/cgroup.subtree_control", os.W_OK)
        return Home(2, mount + scope, is_scope=True) if is_ours else None
    # Only the machine's own root group may have processes beside limited children; a container's has a type.
    is_root = os.access(mount, os.W_OK) and not os.path.exists(mount + "/cgroup.type")
    return Home(2, "%s/%s" % (mount, _NAME)) if is_root and os.path.exists(mount + "/cgroup.procs") else None


def create(name: str, wanted: Optional[Dict[str, Home]] = None) -> Group:
    """``wanted``: of those that ``detect`` found; all of them by default. An ``OSError`` says why it cannot."""
    group = Group(name, detect() if wanted is None else wanted)
    try:
        group.make()
    except OSError:
        group.remove()
        raise
    return group


class Group:
    """One group in each hierarchy that is needed for its controllers."""

    def __init__(self, name: str, homes: Dict[str, Home]) -> None:
        self.homes = homes
        self._name = name

    @property
    def folders(self) -> List[str]:
        return sorted({self._folder(home) for home in self.homes.values()})

    def make(self) -> None:
        for home in set(self.homes.values()):
            if home.version == 2:
                _prepare(home, [name for name in (CPU, MEMORY) if self.homes.get(name) == home])
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder(home))

    def limit(self, cpus: Optional[int], memory_bytes: Optional[int]) -> None:
        """None is no limit. What a hierarchy without that controller cannot hold is an ``OSError``."""
        if cpus is not None:
            home = self._home(CPU)
            quota_us = cpus * _PERIOD_US
            if home.version == 2:
                self._set(home, "cpu.max", "%d %d" % (quota_us, _PERIOD_US))
            else:
                self._set(home, "cpu.cfs_period_us", "%d" % _PERIOD_US)
                self._set_quota(home, quota_us)
        if memory_bytes is not None:
            home = self._home(MEMORY)
            limit, swap = ("memory.max", "memory.swap.max") if home.version == 2 else (
                "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
            )  # fmt: skip
            self._set(home, limit, "%d" % memory_bytes)
            with contextlib.suppress(OSError):  # a kernel that does not account for swap
                self._set(home, swap, "0" if home.version == 2 else "%d" % memory_bytes)

    def enter(self) -> None:
        """With the process that calls this, and what it starts from now on."""
        for folder in self.folders:
            _write(folder + "/cgroup.procs", "0")

    def processes(self) -> List[int]:
        found = {pid for folder in self.folders for pid in _processes(folder)}
        return sorted(found)

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed because of its memory limit."""
        home = self.homes.get(MEMORY)
        if home is None:
            return 0
        file = "memory.events" if home.version == 2 else "memory.oom_control"
        lines = (line.split() for line in read("%s/%s" % (self._folder(home), file)).splitlines())
        return next((int(line[1]) for line in lines if line[:1] == ["oom_kill"]), 0)

    def kill(self) -> None:
        """All processes in it, also those that it starts meanwhile."""
        home = self.homes.get(KILL)
        if home is not None:
            with contextlib.suppress(OSError):  # before Linux 5.14
                self._set(home, "cgroup.kill", "1")
                return
        deadline = time.monotonic() + _REMOVE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)

    def remove(self, limit_s: float = _REMOVE_S) -> bool:
        """False if a process is still in it: one that was killed leaves it a moment after its end."""
        deadline = time.monotonic() + limit_s
        for folder in self.folders:
            while not _is_removed(folder):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE_S)
        return True

    def _home(self, name: str) -> Home:
        if name not in self.homes:
            raise OSError("this node has no control groups for %s" % name)
        return self.homes[name]

    def _folder(self, home: Home) -> str:
        return "%s/%s%s" % (home.folder, "" if home.version == 2 else UNIT_PREFIX, self._name)

    def _set_quota(self, home: Home, quota_us: int) -> None:
        """Version 1 refuses one above that of the group around it; that one holds then."""
        try:
            self._set(home, "cpu.cfs_quota_us", "%d" % quota_us)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def _set(self, home: Home, file: str, text: str) -> None:
        _write("%s/%s" % (self._folder(home), file), text)


def tidy(homes: Dict[str, Home]) -> None:
    """Removes groups that a supervisor which was killed has left; the kernel keeps those that have processes."""
    for home in set(homes.values()):
        with contextlib.suppress(OSError):
            for name in os.listdir(home.folder):
                folder = "%s/%s" % (home.folder, name)
                is_ours = name != SUPERVISORS_OWN if home.version == 2 else name.startswith(UNIT_PREFIX)
                # A young one may be about to be entered.
                if is_ours and os.path.isdir(folder) and time.time() - os.stat(folder).st_mtime > _LEFTOVER_S:
                    _is_removed(folder)


def _prepare(home: Home, controllers: List[str]) -> None:
    """Version 2: a child has the controllers that its parent passes on."""
    if home.is_scope:
        _make(home.folder + "/" + SUPERVISORS_OWN)
        for pid in _processes(home.folder):
            _write("%s/%s/cgroup.procs" % (home.folder, SUPERVISORS_OWN), str(pid))
        folders = [home.folder]
    else:
        _make(home.folder)
        folders = [os.path.dirname(home.folder), home.folder]
    for folder in folders:
        passed_on = read(folder + "/cgroup.subtree_control").split()
        for name in controllers:
            if name not in passed_on:
                _write(folder + "/cgroup.subtree_control", "+" + name)


def _make(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)


# --- what the kernel tells ----------------------------------------------------------------------------------------


def _mounts(mounts: str) -> Iterator[List[str]]:
    """Of control groups: kind, root, mount point, options."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and len(rest) > 2 and rest[0] in ("cgroup", "cgroup2"):
            yield [rest[0], fields[3], fields[4].rstrip("/"), rest[2]]


def _own_groups(groups: str) -> Dict[str, str]:
    """Controller → our group; version 2 has the empty name."""
    own: Dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _controller(options: str) -> str:
    """Of a hierarchy of version 1, the one of interest; cpu and cpuacct often share one."""
    return next((name for name in (CPU, MEMORY) if name in options.split(",")), "")


def _inside(path: str, root: str) -> str:
    """In a container, only what is below the mount's root can be seen."""
    root = root.rstrip("/")
    return path[len(root) :] if (path + "/").startswith(root + "/") else ""


def _processes(folder: str) -> List[int]:
    return [int(line) for line in read(folder + "/cgroup.procs").split()]


def _is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # never created: the kernel provides these files
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# --- enforcement ------------------------------------------------------------------------------------------------------
# How this node can hold jobs to the cores and the memory that they ask for. Loads little: every link asks.


SYSTEMD, AFFINITY, NONE = "systemd", "affinity", "none"
_MANAGER = "/sys/fs/cgroup/user.slice/user-%d.slice/user@%d.service/cgroup.controllers"


def enforcement(homes: Dict[str, Home], delegated: Iterable[str], can_bind: bool) -> Dict[str, str]:
    """How each limit is enforced. ``delegated``: the controllers that a user's systemd passes on to a scope."""

    def by_groups(controller: str) -> Optional[str]:
        home = homes.get(controller)
        if home is not None and not home.is_scope:
            return "cgroup%d" % home.version
        return SYSTEMD if home is not None or controller in delegated else None

    return {"cpus": by_groups(CPU) or (AFFINITY if can_bind else NONE), "memory": by_groups(MEMORY) or NONE}


def offered() -> Dict[str, str]:
    """By this node, for runs that start now."""
    # Without linger, a scope ends with the last login: then it is not used.
    has_scopes = survival()["lingers"] and has_user_manager()
    delegated = read(_MANAGER % (os.getuid(), os.getuid())).split() if has_scopes else []
    return enforcement(detect(), delegated, can_bind=hasattr(os, "sched_setaffinity"))
