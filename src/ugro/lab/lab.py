"""A lab: unequal nodes on this machine, served by the agent of one state directory, created and removed as a whole.

Each node has a home directory, a share of a core and, on request, simulated GPUs. Every process of a lab carries its
mark in the environment, so it can be ended without the agent and after any crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ugro.client.client import Client
from ugro.client.reach import absolute
from ugro.kernel.agent.operations import ReloadClusterFile, UseClusterFile
from ugro.kernel.jobs.model import HOLDING_STATES
from ugro.kernel.support.errors import NotAllowed, UgroError, Unreachable
from ugro.kernel.support.state_dir import StateDir
from ugro.lab import nodes as files
from ugro.lab import throttle as processes
from ugro.lab.nodes import LabNode, Shape, Throttle, Wish

# --- cgroups ----------------------------------------------------------------------------------------------------------
# CPU quotas for lab nodes by control groups, version 1 or 2, where this user may create them.
#
# Speed 1 is one whole core, 0.25 a quarter of a core, however many cores the machine has.


# Short, so that a slow node is evenly slow: a long period makes the steps of a training uneven. The kernel requires a
# quota of at least 1 ms.
_PERIOD_US = 10_000
_LONGEST_PERIOD_US = 1_000_000
_LEAST_QUOTA_US = 1_000
_REMOVE_LIMIT_S = 2.0
_PRECEDENCE = 64
_LARGEST_WEIGHT = {1: 262_144, 2: 10_000}
_JOIN = 'echo $$ > "$1/cgroup.procs"'


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The mount of the CPU controller, and the position of this process in it."""

    version: int
    mount: Path
    own: tuple[str, ...]  # the names of our group and its parents, below the mount

    def places(self) -> Iterator[Path]:
        """Where a group could be created, the highest first, because other logins of this user find that one again."""
        for depth in range(len(self.own) + 1):
            yield self.mount.joinpath(*self.own[:depth])


def create(
    hierarchy: Hierarchy, name: str, speeds: Mapping[str, float], *, takes_precedence: bool = False
) -> Path | None:
    """A group ``name`` with a limited group for each node; None if this user may not create it.

    With precedence, a node of speed 0.5 gets its half core even if other programs are busy, and never more.
    """
    # Not if the nodes together could use the whole machine.
    is_bounded = sum(speeds.values()) < (os.cpu_count() or 1)
    weight = sum(speeds.values()) * (_PRECEDENCE if takes_precedence and is_bounded else 1)
    for place in hierarchy.places():
        group = place / name
        try:
            _make(hierarchy.version, group, weight, speeds)
        except OSError:
            remove(group)
            continue
        if all(_can_join(group / node) for node in speeds):
            return group
        remove(group)
    return None


def find(hierarchy: Hierarchy, name: str) -> list[Path]:
    return [place / name for place in hierarchy.places() if (place / name).is_dir()]


def members(group: Path) -> list[int]:
    """The processes in a group and its children."""
    found: list[int] = []
    for folder in _with_children(group):
        with contextlib.suppress(OSError):
            found += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return found


def remove(group: Path) -> bool:
    """False if a process is still in it."""
    deadline = time.monotonic() + _REMOVE_LIMIT_S
    for folder in reversed(_with_children(group)):
        while not _is_removed(folder):
            # A killed process leaves its group a moment after it has ended.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def quota(speed: float) -> tuple[int, int]:
    """Microseconds of CPU time, and their period."""
    period_us = min(_LONGEST_PERIOD_US, max(_PERIOD_US, round(_LEAST_QUOTA_US / speed)))
    return max(_LEAST_QUOTA_US, round(period_us * speed)), period_us


def limits(version: int, speed: float) -> list[tuple[str, str]]:
    """Files and their new contents, in order."""
    quota_us, period_us = quota(speed)
    if version == 2:
        return [("cpu.max", f"{quota_us} {period_us}"), _weight(version, speed)]
    return [
        # The old quota is removed first: it might be too large for the new period.
        ("cpu.cfs_quota_us", "-1"),
        ("cpu.cfs_period_us", str(period_us)),
        ("cpu.cfs_quota_us", str(quota_us)),
        _weight(version, speed),
    ]


def cpu_hierarchy() -> Hierarchy | None:
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    found = [hierarchy for hierarchy in hierarchies(mounts, groups) if _has_cpu(hierarchy)]
    return found[0] if found else None


def hierarchies(mounts: str, groups: str) -> Iterator[Hierarchy]:
    """Mounts that may have the CPU controller, from /proc/self/mountinfo and /proc/self/cgroup."""
    own = _own_groups(groups)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = (_unescaped(field) for field in before.split()[3:5])
        kind, _, options = after.split()[:3]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and "cpu" not in options.split(",")):
            continue
        path = own.get("cpu" if version == 1 else "", "/")
        # In a container, only what is below the mount's root is visible.
        inside = path[len(root.rstrip("/")) :] if f"{path}/".startswith(f"{root.rstrip('/')}/") else ""
        yield Hierarchy(version, Path(mount), tuple(name for name in inside.split("/") if name))


def _own_groups(groups: str) -> dict[str, str]:
    """Controller → our group; version 2 has the empty name."""
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _has_cpu(hierarchy: Hierarchy) -> bool:
    if hierarchy.version == 1:
        return True
    try:
        return "cpu" in (hierarchy.mount / "cgroup.controllers").read_text().split()
    except OSError:
        return False


def _make(version: int, group: Path, weight: float, speeds: Mapping[str, float]) -> None:
    if version == 2:
        _pass_cpu_on(group.parent)
    group.mkdir(exist_ok=True)
    if version == 2:
        _pass_cpu_on(group)
    _write_all(group, [_weight(version, weight)])
    for node, speed in speeds.items():
        (group / node).mkdir(exist_ok=True)
        _write_all(group / node, limits(version, speed))


def _weight(version: int, speed: float) -> tuple[str, str]:
    """Keeps the ratio of the nodes when the machine has less CPU time than their quotas."""
    name, of_a_core = ("cpu.weight", 100) if version == 2 else ("cpu.shares", 1024)
    return name, str(min(_LARGEST_WEIGHT[version], max(1, round(of_a_core * speed))))


def _pass_cpu_on(group: Path) -> None:
    """Version 2: child groups have the CPU controller only if the parent enables it."""
    switches = group / "cgroup.subtree_control"
    if "cpu" not in switches.read_text().split():
        _write(switches, "+cpu")


def _write_all(group: Path, settings: Iterable[tuple[str, str]]) -> None:
    for name, text in settings:
        _write(group / name, text)


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)  # never created: the kernel provides these files
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _can_join(group: Path) -> bool:
    """Version 2 also requires permissions above the group, so a process tries it."""
    argv = ["sh", "-c", _JOIN, "sh", str(group)]
    return subprocess.run(argv, stderr=subprocess.DEVNULL, check=False, timeout=10).returncode == 0


def _with_children(group: Path) -> list[Path]:
    """The group, then its children; empty if it does not exist."""
    return [Path(folder) for folder, _, _ in os.walk(group)]


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


# --- lab --------------------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    MADE = "made"
    CHANGED = "changed"
    WAS_UP = "was up"


class Lab:
    def __init__(
        self, home: StateDir, *, log_level: str = "info", on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.home = home
        # Resolved: the processes of a lab are found by this path, however the user writes it.
        self.root = Path(os.path.realpath(home.lab))
        self.group_name = f"ugro-lab-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}"
        self._log_level = log_level
        self._on_wait = on_wait or (lambda text: None)

    def shape(self) -> Shape | None:
        return files.remembered(self.root)

    def is_left_over(self) -> bool:
        """Part of a lab exists, but not enough to use it."""
        return self.home.lab.exists() and self.shape() is None

    def processes(self) -> dict[int, str]:
        """pid → home of its node."""
        return processes.of_lab(self.root)

    def client(self) -> Client:
        return Client(
            home=self.home.path, cluster=self.home.lab_cluster, log_level=self._log_level, on_wait=self._on_wait
        )

    def up(self, wish: Wish) -> Outcome:
        """Also repairs a lab that is partly up, for example after a restart of the machine."""
        speeds, gpus = wish.wanted_speeds(), wish.wanted_gpus()
        with _os_errors("cannot create the lab"), self._alone():
            self._refuse_another_cluster()
            found = self.shape()
            if found is not None and wish.is_granted_by(found):
                has_cgroups = any(node.cgroup for node in found.nodes)
                self._serve(self._plan(replace(wish, without_cgroups=not has_cgroups), found.speeds, found.gpus))
                return Outcome.WAS_UP
            was_there = self._take_down()
            try:
                self._serve(self._plan(wish, speeds, gpus))
            except UgroError:
                self._take_down()
                raise
            return Outcome.CHANGED if was_there else Outcome.MADE

    def down(self, *, with_agent: bool = False) -> bool:
        """Ends and removes everything; False if there was nothing. Needs no agent and no complete lab.

        The agent then serves this machine, or is stopped with the lab.
        """
        if not self.home.path.is_dir():
            return False
        with _os_errors("cannot remove the lab"), self._alone():
            return self._take_down(with_agent=with_agent)

    def has_agent(self) -> bool:
        """Whether an agent of this state directory runs, with the lab or without it."""
        try:
            with Client(home=self.home.path, any_cluster=True) as client:
                return client.running_agent() is not None
        except Unreachable:
            return False

    # --- up ----------------------------------------------------------------------------------------------------

    def _plan(self, wish: Wish, speeds: tuple[float, ...], gpus: int) -> Shape:
        self._on_wait("making the nodes")
        names = {f"lab{number}": speed for number, speed in enumerate(speeds, start=1)}
        hierarchy = None if wish.without_cgroups else cpu_hierarchy()
        is_first = wish.takes_precedence
        group = create(hierarchy, self.group_name, names, takes_precedence=is_first) if hierarchy else None
        throttle = Throttle.CGROUP if group else Throttle.DUTY_CYCLE
        nodes = [
            LabNode(name, speed, str(self.root / name), throttle, str(group / name) if group else None)
            for name, speed in names.items()
        ]
        return Shape(tuple(nodes), gpus)

    def _serve(self, shape: Shape) -> None:
        files.write(self.root, shape, self.home.lab_cluster)
        self._on_wait("connecting")
        with self.client() as client:
            client.ask(UseClusterFile(str(absolute(self.home.lab_cluster))))
            client.ask(ReloadClusterFile())

    def _refuse_another_cluster(self) -> None:
        with Client(home=self.home.path, any_cluster=True) as client:
            agent = client.running_agent()
            is_alone = agent is not None and agent.cluster_file is None
            live = client.jobs.newest(1, states=HOLDING_STATES) if is_alone else []
        if live:
            raise NotAllowed(
                f"job {live[0].id} {live[0].spec.name} runs on this machine, which the lab would replace",
                hint="wait for it or cancel it; or give the lab an agent of its own: UGRO_HOME=~/.ugro-lab ugro lab up",
            )
        if agent is not None and agent.cluster_file and not self._is_ours(agent.cluster_file):
            raise NotAllowed(
                f"the agent of {self.home.path} serves {agent.cluster_file}",
                hint="give the lab an agent of its own: UGRO_HOME=~/.ugro-lab ugro lab up",
            )

    def _is_ours(self, cluster_file: str) -> bool:
        return os.path.realpath(cluster_file) == str(self.root / self.home.lab_cluster.name)

    # --- down --------------------------------------------------------------------------------------------------

    def _take_down(self, *, with_agent: bool = False) -> bool:
        was_there = self._release_agent(with_agent) or self.home.lab.exists()
        groups = self._groups()
        # From here on, no process can enter the lab.
        self.home.lab_cluster.unlink(missing_ok=True)
        left = processes.end(lambda: {*self.processes(), *(pid for group in groups for pid in members(group))})
        if left:
            raise UgroError(f"processes of the lab do not exit: {', '.join(map(str, left))}", hint="try it again")
        for group in groups:
            if not remove(group):
                raise UgroError(f"cannot remove {group}", hint="try it again")
        if self.root.exists():
            shutil.rmtree(self.root)
        return was_there or bool(groups)

    def _release_agent(self, is_to_end: bool) -> bool:
        """Ignores an agent that is dead or hangs: it finds no lab to connect to."""
        try:
            with Client(home=self.home.path, any_cluster=True) as client:
                agent = client.running_agent()
                if agent is None or not agent.cluster_file or not self._is_ours(agent.cluster_file):
                    return False
                self._on_wait("closing the links")
                if is_to_end:
                    client.stop_agent()
                else:
                    client.ask(UseClusterFile(None))
        except Unreachable:
            return False
        return True

    def _groups(self) -> list[Path]:
        """The recorded groups, and the default ones of a lab without a record."""
        shape = self.shape()
        found = {Path(node.cgroup).parent for node in shape.nodes if node.cgroup} if shape else set()
        hierarchy = cpu_hierarchy()
        found.update(find(hierarchy, self.group_name) if hierarchy else [])
        return [group for group in found if group.name == self.group_name and group.is_dir()]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Allows one lab command at a time per state directory; the kernel releases the lock when this process ends."""
        self.home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.home.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(folder)
            raise NotAllowed("another lab command is running", hint="try again when it has ended") from error
        try:
            yield
        finally:
            os.close(folder)


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UgroError(f"{what}: {error}", hint="set UGRO_HOME=DIR to use another folder") from error
