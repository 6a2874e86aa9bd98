"""A job's demand: its alternatives, and which GPUs of a node satisfy each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ugro.core.job import ALL_GPUS, Resources
from ugro.core.support.quantity import format_size
from ugro.policy.scheduling.cluster_view import NodeView
from ugro.policy.scheduling.room import Free, Shape
from ugro.policy.wording import count_of, in_words

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
