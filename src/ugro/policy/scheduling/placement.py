"""Which free nodes and GPUs a job gets: the fewest groups, the fastest nodes, the best fit.

Whether it may start at all, and before which others, is decided in ``scheduler``.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ugro.core.job import Placement, Share
from ugro.policy.scheduling.demand import Drawbacks, Need
from ugro.policy.scheduling.ledger import Ledger
from ugro.policy.scheduling.room import Free, Room, Shape

_Key = tuple[float | str, ...]


class Candidates:
    """The nodes that can give one share of a need, best first. During a pass nodes only get fuller."""

    def __init__(self, ledger: Ledger, need: Need, allowed: int, avoid: Mapping[str, str] | None = None) -> None:
        """``avoid``: nodes to use only if no others are free, and why."""
        self.need = need
        self._ledger = ledger
        self._allowed = allowed
        self._avoid = avoid or {}
        self._words = _words(need)
        self._goes_by_load = not need.least_gpus and not need.cpus
        self._seen = len(ledger.changes)
        self._fitting: dict[str, set[Room]] = defaultdict(set)  # by group
        self._heaps: dict[str, list[tuple[_Key, int, Room]]] = defaultdict(list)
        for shape, free, rooms in ledger.alike(need, allowed):
            rank = (need.drawbacks(shape), *_rank(need, shape, free))
            for room in rooms:
                self._add(room, rank)

    def place(self) -> Placed | None:
        """Takes all that the job needs, or nothing."""
        chosen = self._choose()
        if not chosen:
            return None
        preference = self._preference(*chosen[-1])
        return Placed(Placement(tuple(self._take(room) for _, room in chosen)), preference)

    def _choose(self) -> list[tuple[_Key, Room]]:
        self._refresh()
        fitting = sum(map(len, self._fitting.values()))
        if fitting < self.need.min_nodes:
            return []
        wanted = min(self.need.max_nodes, fitting)
        chosen: list[tuple[_Key, Room]] = []
        for group in self._groups(wanted):
            chosen += self._best(group, wanted - len(chosen))
        return chosen

    def _preference(self, key: _Key, room: Room) -> str:
        """Why the last chosen node was preferred to the next best; empty if only by its name."""
        group = self._group(room)
        if not self._fitting[group]:
            return ""
        next_key = self._top(group)
        differs = next(index for index, mine in enumerate(key) if mine != next_key[index])
        if differs >= len(self._words):
            return ""
        other, word = str(next_key[-1]), self._words[differs]
        return f"rather than {other}: {self._avoid[other] if word == _AVOIDED else word}"

    def _groups(self, wanted: int) -> list[str]:
        """The fastest group that has enough nodes; if none has, the largest groups, to span as few as possible."""
        groups = [group for group, rooms in self._fitting.items() if rooms]
        if len(groups) == 1:
            return groups
        enough = [group for group in groups if len(self._fitting[group]) >= wanted]
        if enough:
            return [min(enough, key=lambda group: (self._top(group), group))]
        return sorted(groups, key=lambda group: (-len(self._fitting[group]), self._top(group), group))

    def _best(self, group: str, most: int) -> list[tuple[_Key, Room]]:
        best: list[tuple[_Key, Room]] = []
        while len(best) < most and self._fitting[group]:
            self._top(group)
            key, _, room = heapq.heappop(self._heaps[group])
            self._fitting[group].discard(room)
            best.append((key, room))
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
                self._add(room, (self.need.drawbacks(room.shape), *_rank(self.need, room.shape, free)))
            else:
                self._fitting[self._group(room)].discard(room)

    def _add(self, room: Room, rank: tuple[Drawbacks, *_Rank]) -> None:
        drawbacks, before, after = rank
        node, cost = room.node, room.cost
        first = cost if self._goes_by_load else 0.0
        is_avoided = node.name in self._avoid
        key = (*drawbacks, is_avoided, first, *before, -node.speed, *after, cost, node.name)
        group = self._group(room)
        self._fitting[group].add(room)
        heapq.heappush(self._heaps[group], (key, room.version, room))

    def _group(self, room: Room) -> str:
        return room.node.group if self.need.max_nodes > 1 else ""


# What counts before the node's speed, and what after it; lower is better.
_Rank = tuple[tuple[float, float], tuple[float, float]]
_AVOIDED = "avoided"  # what speaks against the other node is known by its name
_LEAST_LOAD = "the least load"
_LEFT = "the fewest GPUs left over"


@dataclass(frozen=True, slots=True)
class Placed:
    placement: Placement
    preference: str  # why this node and not another, if there was a choice


def _words(need: Need) -> tuple[str, ...]:
    """What each part of a key except the name means, as an advantage over others."""
    before, after = _rank_words(need)
    drawbacks = ("its disk has room", "it has what the script imports", "it is awake sooner")
    return (*drawbacks, _AVOIDED, _LEAST_LOAD, *before, "the fastest", *after, _LEAST_LOAD)


def _rank_words(need: Need) -> tuple[tuple[str, str], tuple[str, str]]:
    if not need.least_gpus:
        return ("it has no free GPUs", "the tightest fit" if need.cpus else "the most cores"), ("", "")
    memory = "the most GPU memory" if need.resources.gpu_memory_bytes is None else "the smallest GPU that will do"
    if need.wants_all_gpus:
        return ("the most free GPUs", ""), (memory, "")
    if need.max_nodes == 1 and need.resources.gpu_memory_bytes is not None:
        return (memory, _LEFT), ("", "")
    return ("", ""), (memory, _LEFT)


def _rank(need: Need, shape: Shape, free: Free) -> _Rank:
    if not need.least_gpus:
        return _rank_without_gpus(need, shape, free)
    usable = (need.fitting_gpus(shape) or 0) & free.gpus
    taken = need.part_of(shape, free).gpus
    left = (usable & ~taken).bit_count()
    largest = max(memory or 0 for position, (_, memory) in enumerate(shape.gpus) if taken >> position & 1)
    has_least = need.resources.gpu_memory_bytes is not None
    memory = largest if has_least else -largest
    if need.wants_all_gpus:
        return (-taken.bit_count(), 0), (memory, 0)
    if has_least and need.max_nodes == 1:
        return (memory, left), (0, 0)
    return (0, 0), (memory, left)


def _rank_without_gpus(need: Need, shape: Shape, free: Free) -> _Rank:
    return (bool(free.gpus), free.cpus - need.cpus if need.cpus else -shape.cores), (0, 0)
