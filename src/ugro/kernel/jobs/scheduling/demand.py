"""A job's demand: its alternatives, and which GPUs of a node satisfy each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ugro.kernel.jobs.model import ALL_GPUS, Resources, Share
from ugro.kernel.jobs.scheduling.model import Holding, NodeView
from ugro.kernel.support.quantities import count_of, format_size, in_words

# --- room on a node ---------------------------------------------------------------------------------------------------
# It is what is free on one node during a pass. GPUs are bits of a mask, in the order in which the node lists them. A
# pass reads these many thousand times, so they are small mutable objects instead of the frozen views.


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


# --- demand -----------------------------------------------------------------------------------------------------------


Drawbacks = tuple[bool, bool, int]


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """One alternative: the same share on each node. Equal needs are one object in a pass, compared by identity."""

    resources: Resources
    min_nodes: int
    max_nodes: int
    least_gpus: int  # of a node
    wants_all_gpus: bool
    is_one_process: bool
    cpus: int | None  # None: one for each process, as far as the node has them
    memory_bytes: int
    note: str = ""  # why it asks for no GPUs, if the job left that open
    import_note: str = ""  # who has what the script imports, and who lacks it
    wants_room: bool = False  # nodes whose disk is full do not count
    wants_awake: bool = False  # nodes that sleep do not count
    most_gpus: int | None = None  # of a node, if it wants all of them; None: as many as there are
    imports: frozenset[str] = frozenset()  # nodes that lack one of them do not count
    wishes: frozenset[str] = frozenset()  # nodes that lack one of them are used last
    user: str = ""  # nodes that are closed to this user do not count; empty: no node is to anybody
    _fitting: dict[Shape, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Resources, *, on_one_node: bool = False, note: str = "") -> Need:
        wants_all = resources.gpus_per_node == ALL_GPUS
        least = 1 if on_one_node else max(1, resources.min_nodes)
        most = 1 if on_one_node else max(least, resources.max_nodes)
        gpus = 1 if wants_all else resources.gpus_per_node
        memory_bytes = resources.memory_bytes
        return cls(resources, least, most, gpus, wants_all, on_one_node, resources.cpus, memory_bytes, note)

    def fitting_gpus(self, shape: Shape) -> int | None:
        """The GPUs that satisfy it, as a mask; None if the node does not have the labels, room or modules."""
        try:
            return self._fitting[shape]
        except KeyError:
            mask = self._fitting[shape] = self._mask(shape) if self._is_right(shape) else None
            return mask

    def _is_right(self, shape: Shape) -> bool:
        if (self.wants_awake and shape.sleep) or self.user in shape.closed_to:
            return False
        if (self.wants_room and shape.is_full) or not self.imports.isdisjoint(shape.lacks):
            return False
        only = self.resources.only
        return shape.labels.issuperset(self.resources.labels) and (not only or shape.name in only)

    def may_use(self, node: NodeView) -> bool:
        """Of a node of which only its name and labels are known."""
        only = self.resources.only
        return set(self.resources.labels).issubset(node.labels) and (not only or node.name in only)

    def drawbacks(self, shape: Shape) -> Drawbacks:
        """Why a node that fits is used last, the worst first."""
        return (shape.is_full, not self.wishes.isdisjoint(shape.lacks), shape.sleep)

    def fits(self, shape: Shape, free: Free) -> bool:
        gpus, cpus, memory_bytes, slots = free
        if cpus < (self.least_cpus(shape) if self.cpus is None else self.cpus):
            return False
        if memory_bytes < self.memory_bytes or slots < 1 or gpus.bit_count() < self.least_gpus:
            return False
        mask = self.fitting_gpus(shape)
        return mask is not None and (mask & gpus).bit_count() >= self.least_gpus

    def least_cpus(self, shape: Shape) -> int:
        if self.cpus is not None:
            return self.cpus
        processes = 1 if self.is_one_process or not self.least_gpus else self.least_gpus
        return min(processes, shape.cores)

    def part_of(self, shape: Shape, free: Free) -> Free:
        """The share it takes of a node that fits."""
        usable = (self.fitting_gpus(shape) or 0) & free.gpus
        gpus = self._all(shape, usable) if self.wants_all_gpus else self._choose(shape, usable, self.least_gpus)
        cpus = self.cpus
        if cpus is None:
            processes = 1 if self.is_one_process or not gpus else gpus.bit_count()
            cpus = min(processes, free.cpus)
        return Free(gpus, cpus, self.memory_bytes, 1)

    def _all(self, shape: Shape, usable: int) -> int:
        most = self.most_gpus
        return usable if most is None or usable.bit_count() <= most else self._choose(shape, usable, most)

    def _choose(self, shape: Shape, usable: int, wanted: int) -> int:
        # A job that states the GPU memory it needs gets the smallest GPUs that have it. One that does not gets the
        # largest: a GPU that is too small fails the job, one that is too large only makes others wait.
        order = shape.by_memory if self.resources.gpu_memory_bytes is not None else reversed(shape.by_memory)
        chosen, count = 0, 0
        for position in order:
            if count == wanted:
                break
            if usable >> position & 1:
                chosen |= 1 << position
                count += 1
        return chosen

    def _mask(self, shape: Shape) -> int:
        fits = (gpu_fits(self.resources, model, memory) for model, memory in shape.gpus)
        return sum(1 << position for position, fit in enumerate(fits) if fit)

    def __str__(self) -> str:
        words = _node_count(self.min_nodes, self.max_nodes)
        parts = [*_gpu_words(self.resources), *_node_words(self.resources)]
        if parts:
            words += f" {'each with' if self.max_nodes > 1 else 'with'} {in_words(parts)}"
        return f"{words} ({self.notes})" if self.notes else words

    @property
    def notes(self) -> str:
        return "; ".join(note for note in (self.note, self.import_note) if note)


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    needs: tuple[Need, ...]  # in order of preference

    def __str__(self) -> str:
        return ", or ".join(str(need) for need in self.needs)


def alternatives(resources: Resources) -> Iterator[Resources]:
    if not resources.any_of:
        yield resources
    for way in resources.any_of:
        yield from alternatives(way)


def names_in(resources: Resources) -> frozenset[str]:
    """The nodes that it names."""
    return frozenset(name for way in alternatives(resources) for name in way.only)


def gpu_fits(resources: Resources, model: str, memory_bytes: int | None) -> bool:
    wanted = resources.gpu_memory_bytes
    if wanted is not None and (memory_bytes is None or memory_bytes < wanted):
        return False
    return not resources.gpu_models or any(_plain(word) in _plain(model) for word in resources.gpu_models)


def _plain(name: str) -> str:
    # People write RTX4090, rtx-4090 and "RTX 4090".
    return re.sub(r"[\s_-]", "", name).casefold()


def _node_count(least: int, most: int) -> str:
    if most == 1:
        return "a node"
    return f"{least} nodes" if least == most else f"{least} to {most} nodes"


def _gpu_words(resources: Resources) -> list[str]:
    if not resources.gpus_per_node:
        return []
    words = "all its GPUs" if resources.gpus_per_node == ALL_GPUS else count_of(resources.gpus_per_node, "GPU")
    if resources.gpu_models:
        words += f" ({in_words(resources.gpu_models, 'or')})"
    if resources.gpu_memory_bytes is not None:
        words += f" of {format_size(resources.gpu_memory_bytes)} or more"
    return [words]


def _node_words(resources: Resources) -> list[str]:
    words = []
    if resources.cpus:
        words.append(count_of(resources.cpus, "core"))
    elif resources.cpus is None and not resources.gpus_per_node:
        words.append("a free core")
    if resources.memory_bytes:
        words.append(f"{format_size(resources.memory_bytes)} of memory")
    words += [f"the label {label}" for label in resources.labels]
    words += [f"the name {in_words(resources.only, 'or')}"] if resources.only else []
    return words
