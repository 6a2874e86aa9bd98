"""Which node each worker of a Ray cluster gets, and what it gets of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.core.errors import Unsatisfiable
from ugro.core.ray_cluster import ClusterWish, Worker
from ugro.policy.wording import count_of


@dataclass(frozen=True, slots=True)
class Place:
    """A node that workers may use."""

    node: str
    cores: int
    python: str
    speed: float | None = None


def first_workers(wish: ClusterWish, places: Sequence[Place]) -> tuple[Worker, ...]:
    """``workers_per_node`` on each of them. Raises Unsatisfiable."""
    found: list[Worker] = []
    for place in places:
        cpus = cpus_of(wish, place)
        for _ in range(wish.workers_per_node):
            found.append(Worker(len(found) + 1, place.node, cpus, place.python, place.speed))
    return tuple(found)


def cpus_of(wish: ClusterWish, place: Place) -> int:
    if wish.size.cpus is not None:
        needed = wish.size.cpus * wish.workers_per_node
        if needed > place.cores:
            raise _too_few(place, f"{count_of(wish.workers_per_node, 'worker')} of {wish.size.cpus}")
        return wish.size.cpus
    cpus = place.cores // wish.workers_per_node
    if not cpus:
        raise _too_few(place, count_of(wish.workers_per_node, "worker"))
    return cpus


def _too_few(place: Place, what: str) -> Unsatisfiable:
    return Unsatisfiable(
        f"it has {count_of(place.cores, 'core')}, too few for {what}",
        hint="ask for fewer with --workers-per-node or --cpus",
        subject=place.node,
    )


def more_workers(
    wish: ClusterWish, workers: Sequence[Worker], places: Iterable[Place], wanted: int, first: int
) -> tuple[Worker, ...]:
    """Those to add, numbered from ``first``: always on the node that has the fewest. Raises Unsatisfiable."""
    room = {place.node: place for place in places}
    counts = {node: sum(worker.node == node for worker in workers) for node in room}
    added: list[Worker] = []
    while len(workers) + len(added) < wanted:
        free = [node for node in room if counts[node] < _most(wish, room[node])]
        if not free:
            most = len(workers) + len(added)
            raise Unsatisfiable(
                f"there is room for {count_of(most, 'worker')} of this size, not for {wanted}",
                hint="other nodes can be added: ugro node add; smaller workers: ugro cluster start --cpus N",
            )
        node = min(free, key=lambda name: counts[name])
        counts[node] += 1
        place = room[node]
        added.append(Worker(first + len(added), node, cpus_of(wish, place), place.python, place.speed))
    return tuple(added)


def _most(wish: ClusterWish, place: Place) -> int:
    return place.cores // wish.size.cpus if wish.size.cpus else wish.workers_per_node


def to_drop(workers: Sequence[Worker], wanted: int) -> tuple[Worker, ...]:
    """The newest go first."""
    return tuple(sorted(workers, key=lambda worker: worker.number)[wanted:])
