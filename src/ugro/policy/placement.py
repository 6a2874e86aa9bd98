"""Which nodes and GPUs a job gets, of those that are free: the fewest groups, the fastest nodes, the best fit.

Whether it may start at all, and before whom, is not decided here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from ugro.core.job import Placement, Share
from ugro.policy.demand import Need
from ugro.policy.ledger import Ledger
from ugro.policy.room import Free, Room, Shape

_Key = tuple[float | str, ...]


class Candidates:
    """The nodes that can give one share of a need, best first. During a pass nodes only get fuller, never emptier."""

    def __init__(self, ledger: Ledger, need: Need, allowed: int, avoid: Iterable[str] = ()) -> None:
        self.need = need
        self._ledger = ledger
        self._allowed = allowed
        self._avoid = frozenset(avoid)
        self._seen = len(ledger.changes)
        self._fitting: dict[str, set[Room]] = defaultdict(set)  # by group
        self._heaps: dict[str, list[tuple[_Key, int, Room]]] = defaultdict(list)
        for shape, free, rooms in ledger.alike(need, allowed):
            rank = _rank(need, shape, free)
            for room in rooms:
                self._add(room, rank)

    def place(self) -> Placement | None:
        """Take what the job needs, whole or not at all."""
        rooms = self._choose()
        if not rooms:
            return None
        return Placement(tuple(self._take(room) for room in rooms))

    def _choose(self) -> list[Room]:
        self._refresh()
        fitting = sum(map(len, self._fitting.values()))
        if fitting < self.need.min_nodes:
            return []
        wanted = min(self.need.max_nodes, fitting)
        chosen: list[Room] = []
        for group in self._groups(wanted):
            chosen += self._best(group, wanted - len(chosen))
        return chosen

    def _groups(self, wanted: int) -> list[str]:
        """One group that has enough, the fastest; otherwise those with most, so that few are spanned."""
        groups = [group for group, rooms in self._fitting.items() if rooms]
        if len(groups) == 1:
            return groups
        enough = [group for group in groups if len(self._fitting[group]) >= wanted]
        if enough:
            return [min(enough, key=lambda group: (self._top(group), group))]
        return sorted(groups, key=lambda group: (-len(self._fitting[group]), self._top(group), group))

    def _best(self, group: str, most: int) -> list[Room]:
        best: list[Room] = []
        while len(best) < most and self._fitting[group]:
            self._top(group)
            room = heapq.heappop(self._heaps[group])[2]
            self._fitting[group].discard(room)
            best.append(room)
        return best

    def _take(self, room: Room) -> Share:
        part = self.need.part_of(room.shape, room.open_to(self._allowed))
        return self._ledger.take(room, part, self._allowed)

    def _top(self, group: str) -> _Key:
        heap, fitting = self._heaps[group], self._fitting[group]
        while heap[0][1] != heap[0][2].version or heap[0][2] not in fitting:
            heapq.heappop(heap)
        return heap[0][0]

    def _refresh(self) -> None:
        changed = dict.fromkeys(self._ledger.changes[self._seen :])
        self._seen = len(self._ledger.changes)
        for room in changed:
            free = room.open_to(self._allowed)
            if self.need.fits(room.shape, free):
                self._add(room, _rank(self.need, room.shape, free))
            else:
                self._fitting[self._group(room)].discard(room)

    def _add(self, room: Room, rank: _Rank) -> None:
        before, after = rank
        key = (room.node.name in self._avoid, *before, -room.node.speed, *after, room.node.name)
        group = self._group(room)
        self._fitting[group].add(room)
        heapq.heappush(self._heaps[group], (key, room.version, room))

    def _group(self, room: Room) -> str:
        return room.node.group if self.need.max_nodes > 1 else ""


# What counts before the node's speed, and what after it; less is better.
_Rank = tuple[tuple[float, float], tuple[float, float]]


def _rank(need: Need, shape: Shape, free: Free) -> _Rank:
    if not need.least_gpus:
        return _rank_without_gpus(need, shape, free)
    usable = (need.fitting_gpus(shape) or 0) & free.gpus
    taken = need.part_of(shape, free).gpus
    left = (usable & ~taken).bit_count()
    largest = max(memory or 0 for position, (_, memory) in enumerate(shape.gpus) if taken >> position & 1)
    if need.wants_all_gpus:
        return (-taken.bit_count(), 0), (largest, 0)
    if need.max_nodes > 1:
        return (0, 0), (largest, left)
    if need.resources.gpu_memory_bytes is not None:
        return (largest, left), (0, 0)
    return (0, 0), (-largest, left)


def _rank_without_gpus(need: Need, shape: Shape, free: Free) -> _Rank:
    has_free_gpus = bool(free.gpus)
    if need.cpus:
        return (has_free_gpus, free.cpus - need.cpus), (0, 0)
    # Who asks for nothing is spread: the node with the most room for more.
    return (has_free_gpus, 1 - free.slots / shape.slots), (0, 0)
