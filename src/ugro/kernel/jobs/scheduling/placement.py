"""Which free nodes and GPUs a job gets: the fewest groups, the fastest nodes, the best fit.

Whether it may start at all, and before which others, is decided in ``scheduler``.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ugro.kernel.jobs.model import Placement, Share, Sharing
from ugro.kernel.jobs.scheduling.demand import Claim, Drawbacks, Free, Held, Need, Room, Shape, Shapes, empty
from ugro.kernel.jobs.scheduling.model import STOPPING_S, ClusterView, Holding

# --- what is free during a pass ---------------------------------------------------------------------------------------
# The ledger has what is free on all nodes and which jobs hold the rest, and is updated as a pass assigns devices. It
# decides nothing.


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices kept for a job that cannot start yet. ``start`` is the latest time it can start; None: unknown."""

    job: int
    bit: int
    need: Need
    claims: tuple[Claim, ...]
    start: float | None

    @property
    def holders(self) -> tuple[int, ...]:
        """The jobs that must end first."""
        return tuple(dict.fromkeys(held.holder.id for claim in self.claims for held in claim.ended))

    def overlaps(self, placement: Placement) -> bool:
        kept = {claim.room.node.name: claim for claim in self.claims}
        return any(
            not share.gpus or bool(claim.room.mask_of(share.gpus) & claim.part.gpus)
            for share in placement.shares
            if (claim := kept.get(share.node)) is not None
        )


class Ledger:
    def __init__(self, view: ClusterView) -> None:
        self.now = view.now
        self.nodes = sorted(view.nodes, key=lambda node: node.name)
        self.rooms: dict[str, Room] = {}
        self.holdings = {holder.id: holder for holder in sorted(view.holding, key=lambda holder: holder.id)}
        self.parts: dict[int, list[tuple[Room, Held]]] = defaultdict(list)
        self.ends: list[tuple[float, int]] = []  # of jobs whose end is known, the first to end first
        self.known_end: dict[int, float] = {}
        self.reservations: list[Reservation] = []
        self.changes: list[Room] = []  # each room that something was taken from, in order
        self._make_rooms()
        self._enter_holdings()
        self.open_rooms = sum(room.free.slots > 0 for room in self.rooms.values())
        # Nodes with the same hardware and the same free devices are examined once.
        self._alike: dict[tuple[Shape, Free], dict[Room, None]] = defaultdict(dict)
        self._alike_when_empty: dict[tuple[Shape, Free], list[Room]] = defaultdict(list)
        for room in self.rooms.values():
            self._alike[room.shape, room.free][room] = None
            self._alike_when_empty[room.shape, room.capacity].append(room)

    def alike(self, need: Need, allowed: int) -> Iterator[tuple[Shape, Free, list[Room]]]:
        """The rooms that can give one share of ``need`` now, grouped by what is free in them."""
        for (shape, free), rooms in self._alike.items():
            if not need.fits(shape, free):
                continue
            yield shape, free, [room for room in rooms if not room.kept]
            for room in rooms:
                if room.kept and need.fits(shape, open_now := room.open_to(allowed)):
                    yield shape, open_now, [room]

    def all_alike(self) -> Iterator[tuple[Shape, Free, Collection[Room]]]:
        """All rooms, grouped by what is free in them, whether or not it is reserved."""
        for (shape, free), rooms in self._alike.items():
            yield shape, free, rooms

    def count_capable(self, need: Need) -> int:
        return sum(len(rooms) for alike, rooms in self._alike_when_empty.items() if need.fits(*alike))

    def capable(self, need: Need) -> Iterator[Room]:
        """The rooms that could give one share if none of our jobs were running."""
        for (shape, free), rooms in self._alike_when_empty.items():
            if need.fits(shape, free):
                yield from rooms

    def take(self, room: Room, part: Free, allowed: int) -> Share:
        alike = self._alike[room.shape, room.free]
        del alike[room]
        if not alike:
            del self._alike[room.shape, room.free]
        room.take(part, allowed)
        self.open_rooms -= not room.free.slots
        self._alike[room.shape, room.free][room] = None
        self.changes.append(room)
        return room.share(part)

    def reserve(self, reservation: Reservation) -> None:
        self.reservations.append(reservation)
        for claim in reservation.claims:
            claim.room.keep(reservation.bit, claim)
            self.changes.append(claim.room)

    def stop(self, job: int) -> None:
        """This pass has decided to stop it."""
        if job in self.known_end:
            self.ends.remove((self.known_end[job], job))
        self.known_end[job] = self.now + STOPPING_S
        bisect.insort(self.ends, (self.known_end[job], job))

    def is_ending(self, job: int) -> bool:
        return self.known_end.get(job, float("inf")) <= self.now + STOPPING_S

    def allowed(self, end: float | None) -> int:
        """The reservations whose devices a job that ends by ``end`` may use: those that start later."""
        if end is None:
            return 0
        return sum(one.bit for one in self.reservations if one.start is not None and end <= one.start)

    def _end_of_sharing(self, holder: Holding) -> float:
        if not any(share.gpu_group for share in holder.placement.shares):
            return 0.0
        end = holder.end(self.now)
        return float("inf") if end is None else end

    def _make_rooms(self) -> None:
        shapes = Shapes()
        for node in self.nodes:
            if node.unusable is None:
                self.rooms[node.name] = Room(node, shapes.of(node), empty(node))

    def _enter_holdings(self) -> None:
        # Of those that share a GPU, the last to end is the one by whose end it becomes free.
        last_first = sorted(self.holdings.values(), key=self._end_of_sharing, reverse=True)
        for holder in last_first:
            for share in holder.placement.shares:
                room = self.rooms.get(share.node)
                if room is not None:
                    self.parts[holder.id].append((room, room.hold(holder, share)))
            end = holder.end(self.now)
            if end is not None:
                self.known_end[holder.id] = end
                self.ends.append((end, holder.id))
        self.ends.sort()


# --- placing a job ----------------------------------------------------------------------------------------------------


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


# --- GPUs that jobs of a group share ----------------------------------------------------------------------------------
# The first job takes a whole GPU, as every job does, and others of its group may join it there. Strangers never share
# one. Nobody joins on a node on which something is reserved: a job that comes later would keep the GPU from the job
# that waits for it.


def join(need: Need, ledger: Ledger, avoid: tuple[str, ...] = ()) -> tuple[Placement, str] | None:
    """A place beside others of its group, on the fastest node, and the reason; None: there is none."""
    sharing = need.resources.sharing
    if sharing is None or need.max_nodes != 1 or need.least_gpus != 1 or need.wants_all_gpus:
        return None
    found = [
        (-room.node.speed, room.node.name, position, room)
        for room in ledger.rooms.values()
        if not room.kept and room.node.name not in avoid
        for position in _seats(need, sharing, room)
    ]
    if not found:
        return None
    _, name, position, room = min(found, key=lambda one: one[:3])
    part = need.part_of(room.shape, room.free._replace(gpus=1 << position))
    others = room.seats[position][1]
    placement = shared(Placement((ledger.take(room, part, 0),)), ledger, sharing)
    index = room.node.gpus[position].index
    return placement, f"shares GPU {index} of {name} with {others} other{'s' if others > 1 else ''} of {sharing.group}"


def shared(placement: Placement, ledger: Ledger, sharing: Sharing) -> Placement:
    """The same, and others of the group may join it."""
    for share in placement.shares:
        room = ledger.rooms[share.node]
        room.sit(share.gpus, sharing.group)
    return Placement(tuple(replace(share, gpu_group=sharing.group) for share in placement.shares))


def _seats(need: Need, sharing: Sharing, room: Room) -> Iterator[int]:
    for position, (group, count) in room.seats.items():
        gpu = room.node.gpus[position]
        if group != sharing.group or count >= sharing.most or gpu.is_foreign or gpu.is_broken:
            continue
        if need.fits(room.shape, room.free._replace(gpus=1 << position)):
            yield position
