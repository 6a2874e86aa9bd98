"""Which running jobs are stopped for a more urgent one: preemptible, of lower priority, few, and the youngest first.

No job is stopped unless the urgent job can then start.
"""

from __future__ import annotations

from ugro.policy.scheduling.cluster_view import Holding
from ugro.policy.scheduling.demand import Demand, Need
from ugro.policy.scheduling.ledger import Ledger
from ugro.policy.scheduling.room import Free, Held, Room

_Victims = tuple[Holding, ...]


def victims_for(demand: Demand, priority: int, ledger: Ledger) -> _Victims:
    """The jobs to stop for the first alternative that this makes possible; none if it helps no alternative."""
    candidates = {
        holder.id: holder
        for holder in ledger.holdings.values()
        if holder.is_preemptible and holder.priority < priority
    }
    if not candidates:
        return ()
    for need in demand.needs:
        victims = _Search(need, ledger, candidates).run()
        if victims:
            return victims
    return ()


class _Search:
    def __init__(self, need: Need, ledger: Ledger, candidates: dict[int, Holding]) -> None:
        self.need = need
        self.ledger = ledger
        self.candidates = candidates
        self.chosen: dict[int, Holding] = {}

    def run(self) -> _Victims:
        costs = {room: cost for room in self.ledger.capable(self.need) if (cost := self._cost(room)) is not None}
        rooms: list[Room] = []
        while len(rooms) < self.need.min_nodes:
            if not costs:
                return ()
            room = min(costs, key=lambda room: _dearness(room, costs[room]))
            rooms.append(room)
            victims = costs.pop(room)
            self.chosen |= {victim.id: victim for victim in victims}
            self._update(costs, victims)
        self._spare_the_needless(rooms)
        return tuple(sorted(self.chosen.values(), key=_youth))

    def _cost(self, room: Room) -> _Victims | None:
        """The further jobs to stop so that this node fits; None if it would not fit even then."""
        ended = [held for held in room.held if self._is_going(held)]
        state = room.open_after(ended)
        # Devices that another reservation counts on would not be free for this one.
        promised = {job for kept in room.kept for job in kept.ended}
        left = [
            held
            for held in room.held
            if held.holder.id in self.candidates and held not in ended and held.holder.id not in promised
        ]
        victims: list[Holding] = []
        while not self.need.fits(room.shape, state):
            if not left:
                return None
            held = min(left, key=lambda held: (-self._help(room, state, held.part), _youth(held.holder)))
            left.remove(held)
            victims.append(held.holder)
            state = state.plus(held.part)
        return tuple(victims)

    def _help(self, room: Room, state: Free, part: Free) -> float:
        """How much of what is missing this part provides: up to 1 for each resource that is short."""
        fitting = self.need.fitting_gpus(room.shape) or 0
        short_gpus = self.need.least_gpus - (fitting & state.gpus).bit_count()
        shortages = (
            (short_gpus, (fitting & part.gpus).bit_count()),
            (self.need.least_cpus(room.shape) - state.cpus, part.cpus),
            (self.need.memory_bytes - state.memory_bytes, part.memory_bytes),
            (1 - state.slots, part.slots),
        )
        return sum(min(1.0, gain / short) for short, gain in shortages if short > 0)

    def _update(self, costs: dict[Room, _Victims], victims: _Victims) -> None:
        """Stopping a job that spans nodes makes its other nodes cheaper, too."""
        for victim in victims:
            for room, _ in self.ledger.parts[victim.id]:
                if room in costs and (cost := self._cost(room)) is not None:
                    costs[room] = cost

    def _spare_the_needless(self, rooms: list[Room]) -> None:
        for victim in sorted(self.chosen.values(), key=_youth, reverse=True):
            del self.chosen[victim.id]
            if not all(self._fits(room) for room in rooms):
                self.chosen[victim.id] = victim

    def _fits(self, room: Room) -> bool:
        state = room.open_after(held for held in room.held if self._is_going(held))
        return self.need.fits(room.shape, state)

    def _is_going(self, held: Held) -> bool:
        return held.holder.id in self.chosen or self.ledger.is_ending(held.holder.id)


def _dearness(room: Room, victims: _Victims) -> tuple[int, list[tuple[float, int]], float, str]:
    return (len(victims), sorted(map(_youth, victims)), -room.node.speed, room.node.name)


def _youth(holder: Holding) -> tuple[float, int]:
    """The youngest first: stopping it loses the least work."""
    started_at = holder.started_at
    return (float("-inf") if started_at is None else -started_at, -holder.id)
