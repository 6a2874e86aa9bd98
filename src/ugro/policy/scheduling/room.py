"""What is free on one node during a pass. GPUs are bits of a mask, in the order in which the node lists them.

A pass reads these many thousand times, so they are small mutable objects instead of the frozen views.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ugro.core.job import Share
from ugro.policy.scheduling.cluster_view import Holding, NodeView

# Jobs that request no cores still need a process, memory and a log: this many per core may share a node.
_SLOTS_PER_CORE = 16
_LEAST_SLOTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The hardware that equal nodes have in common. Equal shapes are one object in a pass, compared by identity."""

    gpus: tuple[tuple[str, int | None], ...]  # model and memory
    labels: frozenset[str]
    cores: int
    is_full: bool = False  # its disk has no room
    lacks: frozenset[str] = frozenset()  # modules that its Python does not find
    name: str = ""  # of a node that a job asks for
    sleep: int = 0  # how long until it is awake: 0 is awake, then waking, then asleep
    closed_to: frozenset[str] = frozenset()  # users whose jobs cannot start there
    by_memory: tuple[int, ...] = field(init=False)  # positions of the GPUs, the smallest first

    def __post_init__(self) -> None:
        order = sorted(range(len(self.gpus)), key=lambda position: (self.gpus[position][1] or 0, position))
        object.__setattr__(self, "by_memory", tuple(order))


class Free(NamedTuple):
    gpus: int  # a bit for each
    cpus: int
    memory_bytes: int
    slots: int

    def plus(self, other: Free) -> Free:
        return Free(self[0] | other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])

    def minus(self, other: Free) -> Free:
        return Free(self[0] & ~other[0], self[1] - other[1], self[2] - other[2], self[3] - other[3])

    def within(self, other: Free) -> Free:
        return Free(self[0] & other[0], min(self[1], other[1]), min(self[2], other[2]), min(self[3], other[3]))


@dataclass(slots=True)
class Kept:
    """What other jobs may still take from a node on which something is reserved."""

    reservation: int  # its bit among the reservations of this pass
    spare: Free
    ended: frozenset[int]  # the jobs that the reservation assumes to have ended here


@dataclass(frozen=True, slots=True)
class Held:
    """What one job holds of one node."""

    holder: Holding
    part: Free


@dataclass(frozen=True, slots=True)
class Claim:
    """A part of one node for later: once ``ended`` have ended, ``state`` is free and ``part`` of it is reserved."""

    room: Room
    ended: tuple[Held, ...]
    state: Free
    part: Free


@dataclass(slots=True, eq=False)
class Room:
    node: NodeView
    shape: Shape
    free: Free
    capacity: Free = field(init=False)  # what would be free if none of our jobs were running
    held: list[Held] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    # By position, GPUs that jobs of one group share: the group, and how many of its jobs have it.
    seats: dict[int, tuple[str, int]] = field(default_factory=dict)
    given: int = 0  # cores assigned in this pass; a job without cores counts as one
    version: int = 0

    def __post_init__(self) -> None:
        self.capacity = self.free

    @property
    def cost(self) -> float:
        """The node's load including what this pass has assigned, which is not measured yet."""
        return self.node.cost + self.given / max(1, self.node.cores)

    def hold(self, holder: Holding, share: Share) -> Held:
        part = Free(self.mask_of(share.gpus) & self.free.gpus, share.cpus, share.memory_bytes, 1)
        self.free = self.free.minus(part)
        if share.gpu_group:
            self.sit(share.gpus, share.gpu_group)
        held = Held(holder, part)
        self.held.append(held)
        return held

    def sit(self, indices: tuple[int, ...], group: str) -> None:
        """One more job of the group has these GPUs."""
        for position, gpu in enumerate(self.node.gpus):
            if gpu.index in indices:
                self.seats[position] = (group, self.seats.get(position, (group, 0))[1] + 1)

    def open_to(self, allowed: int) -> Free:
        """What is free for a job that may use the reservations in ``allowed``."""
        free = self.free
        for kept in self.kept:
            if not kept.reservation & allowed:
                free = free.within(kept.spare)
        return free

    def open_after(self, ended: Iterable[Held]) -> Free:
        """What would be free for a job without a reservation once those have ended."""
        ended = list(ended)
        free = self.free
        for held in ended:
            free = free.plus(held.part)
        for kept in self.kept:
            spare = kept.spare
            for held in ended:
                spare = spare if held.holder.id in kept.ended else spare.plus(held.part)
            free = free.within(spare)
        return free

    def take(self, part: Free, allowed: int) -> None:
        self.free = self.free.minus(part)
        self.given += max(1, part.cpus)
        self.version += 1
        for kept in self.kept:
            if not kept.reservation & allowed:
                kept.spare = kept.spare.minus(part)

    def keep(self, reservation: int, claim: Claim) -> None:
        for kept in self.kept:
            kept.spare = kept.spare.minus(claim.part)
        ended = frozenset(held.holder.id for held in claim.ended)
        self.kept.append(Kept(reservation, claim.state.minus(claim.part), ended))
        self.version += 1

    def share(self, part: Free) -> Share:
        given = [gpu for position, gpu in enumerate(self.node.gpus) if part.gpus >> position & 1]
        uuids = tuple(gpu.uuid for gpu in given) if any(gpu.uuid for gpu in given) else ()
        return Share(self.node.name, tuple(gpu.index for gpu in given), part.cpus, part.memory_bytes, uuids=uuids)

    def mask_of(self, indices: tuple[int, ...]) -> int:
        return sum(1 << position for position, gpu in enumerate(self.node.gpus) if gpu.index in indices)


class Shapes:
    """One object per distinct shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Shape] = {}

    def of(self, node: NodeView) -> Shape:
        gpus = tuple((gpu.model, gpu.memory_bytes) for gpu in node.gpus)
        is_full = node.no_room is not None
        name = node.name if node.is_named else ""
        sleep = node.asleep.rank if node.asleep is not None else 0
        closed_to = frozenset(one.user for one in node.no_login)
        key = (gpus, node.labels, node.cores, is_full, node.lacks, name, sleep, closed_to)
        shape = self._known.get(key)
        if shape is None:
            labels = frozenset(node.labels)
            shape = self._known[key] = Shape(gpus, labels, node.cores, is_full, node.lacks, name, sleep, closed_to)
        return shape


def empty(node: NodeView, *, with_foreign: bool = False) -> Free:
    """All of a node. A GPU used by other processes counts as taken, a broken one as missing."""
    mask = 0
    for position, gpu in enumerate(node.gpus):
        if not gpu.is_broken and (with_foreign or not gpu.is_foreign):
            mask |= 1 << position
    slots = max(_LEAST_SLOTS, _SLOTS_PER_CORE * node.cores)
    return Free(mask, node.cores, node.memory_bytes, slots)
