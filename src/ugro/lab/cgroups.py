"""CPU quotas for lab nodes by control groups, version 1 or 2, where this user may create them.

Speed 1 is one whole core, 0.25 a quarter of a core, however many cores the machine has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
