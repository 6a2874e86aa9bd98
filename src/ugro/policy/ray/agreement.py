"""Whether the nodes of a Ray cluster have what it needs: the same Ray, the same minor Python, shared memory, ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ugro.core.errors import UgroError, Unsatisfiable
from ugro.core.ray_cluster import ClusterWish
from ugro.core.support.quantity import format_size
from ugro.policy.wording import names

LEAST_RAY = (2, 52)  # the first with token authentication
LEAST_STORE_BYTES = 80 << 20
_WANTED = '"ray[default]{}"'


@dataclass(frozen=True, slots=True)
class Look:
    """What a node says of itself."""

    python: str
    ray: str | None
    has_dashboard: bool
    shared_bytes: int
    available_bytes: int
    taken_ports: tuple[int, ...] = ()
    unreached: str | None = None  # why it does not reach the head


def objection(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    """What keeps Ray from running on these nodes together.

    ``pythons``: the program that each would use; none if UGRO makes an environment for them.
    """
    checks = (_lack, _too_old, _differing_ray, _differing_python)
    return next((found for check in checks if (found := check(looks, pythons)) is not None), None)


def lack_of_connection(looks: Mapping[str, Look], address: str) -> UgroError | None:
    for node, look in looks.items():
        if look.unreached is not None:
            return Unsatisfiable(
                f"cannot connect to the head at {address}: {look.unreached}",
                hint="check all pairs of nodes: ugro doctor",
                subject=node,
            )
    return None


def note(looks: Mapping[str, Look]) -> str | None:
    """A difference that Ray is told to accept."""
    versions = _groups({node: look.python for node, look in looks.items()})
    if len(versions) < 2:
        return None
    return f"Python differs in its patch release: {_in_words(versions)}; Ray accepts that"


def lack_of_memory(wish: ClusterWish, looks: Mapping[str, Look]) -> UgroError | None:
    """The object stores of all workers of a node share its /dev/shm."""
    size = wish.size
    if size.memory_bytes and size.object_store_bytes is None and size.memory_bytes * 3 // 10 < LEAST_STORE_BYTES:
        return Unsatisfiable(
            f"{format_size(size.memory_bytes)} of memory are too little for a worker: 30% of it are for objects, of "
            f"which Ray needs {format_size(LEAST_STORE_BYTES)} at least",
            hint="give each worker more: --memory 300MB",
        )
    for node, look in looks.items():
        part = look.available_bytes * 2 // 10 // wish.workers_per_node  # for objects, roughly
        if wish.size.memory_bytes is None and part < LEAST_STORE_BYTES:
            return Unsatisfiable(
                f"too little memory: {format_size(look.available_bytes)} are free",
                hint="use fewer workers, or leave the node out: --only NODE",
                subject=node,
            )
        each = wish.size.object_store_bytes or LEAST_STORE_BYTES
        needed = each * wish.workers_per_node
        if needed > look.shared_bytes:
            return Unsatisfiable(
                f"too little shared memory: {format_size(look.shared_bytes)} are free in /dev/shm, and "
                f"{format_size(needed)} are needed",
                hint="fewer workers, a smaller --object-store-memory, or a larger /dev/shm: "
                "mount -o remount,size=4G /dev/shm",
                subject=node,
            )
    return None


def free_port(wanted: int, is_asked_for: bool, taken: Sequence[int], key: str, node: str) -> int:
    """The one of the cluster file, or the next free one if that is only the default. Raises Unsatisfiable."""
    if wanted not in taken:
        return wanted
    if not is_asked_for:
        for port in candidates(wanted):
            if port not in taken:
                return port
    raise Unsatisfiable(
        f"port {wanted} is taken ({key} in cluster.yaml)",
        hint=f"see who listens: ugro exec {node} -- ss -ltnp; or set another port",
        subject=node,
    )


def candidates(port: int) -> range:
    return range(port, min(port + 20, 65536))


def _lack(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    without = [node for node, look in looks.items() if look.ray is None]
    bare = [node for node, look in looks.items() if look.ray is not None and not look.has_dashboard]
    versions = [look.ray for look in looks.values() if look.ray is not None]
    wanted = f"=={versions[0]}" if versions else ""
    if without:
        return Unsatisfiable(f"Ray is not installed on {names(without)}", hint=_install(without, pythons, wanted))
    if bare:
        return Unsatisfiable(
            f"Ray on {names(bare)} lacks its dashboard and agents", hint=_install(bare, pythons, wanted)
        )
    return None


def _too_old(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    old = [node for node, look in looks.items() if _numbers(look.ray or "") < LEAST_RAY]
    if not old:
        return None
    least = ".".join(map(str, LEAST_RAY))
    return Unsatisfiable(
        f"Ray {looks[old[0]].ray} on {names(old)} has no token authentication, which came with {least}",
        hint=_install(old, pythons, f">={least}"),
    )


def _differing_ray(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    groups = _groups({node: look.ray or "" for node, look in looks.items()})
    if len(groups) < 2:
        return None
    wanted, *others = groups
    differ = [node for version in others for node in groups[version]]
    return Unsatisfiable(
        f"Ray differs: {_in_words(groups)}; it must be the same everywhere",
        hint=_install(differ, pythons, f"=={wanted}"),
    )


def _differing_python(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    groups = _groups({node: ".".join(look.python.split(".")[:2]) for node, look in looks.items()})
    if len(groups) < 2:
        return None
    wanted, *others = groups
    differ = [node for version in others for node in groups[version]]
    return Unsatisfiable(
        f"Python differs: {_in_words(groups)}; Ray needs the same minor version everywhere",
        hint=f"under {', '.join(differ)} in cluster.yaml: python: python{wanted}; or let UGRO make the same "
        'environment everywhere: ugro cluster start --package "ray[default]"',
    )


def _groups(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """Nodes by version, the most common first."""
    found: dict[str, list[str]] = {}
    for node, version in versions.items():
        found.setdefault(version, []).append(node)
    return dict(sorted(found.items(), key=lambda group: -len(group[1])))


def _in_words(groups: Mapping[str, Sequence[str]]) -> str:
    parts = [f"{names(nodes)} {'has' if len(nodes) == 1 else 'have'} {version}" for version, nodes in groups.items()]
    return ", ".join(parts)


def _install(nodes: Sequence[str], pythons: Mapping[str, str], wanted: str) -> str:
    what = _WANTED.format(wanted)
    if not pythons:
        return f"name it with --package {what}, or below environment: packages: [{what}, …]"
    paths = {pythons[node] for node in nodes}
    python = paths.pop() if len(paths) == 1 else "python3"
    return (
        f"ugro exec {' '.join(nodes)} -- {python} -m pip install {what}; "
        f"or let UGRO install it: ugro cluster start --package {what}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)
