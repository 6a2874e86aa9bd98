"""What is free on all nodes and which jobs hold the rest, updated as a pass assigns devices. It decides nothing."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ugro.core.job import Placement, Share
from ugro.policy.scheduling.cluster_view import STOPPING_S, ClusterView, Holding
from ugro.policy.scheduling.demand import Need
from ugro.policy.scheduling.room import Claim, Free, Held, Room, Shape, Shapes, empty


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
