"""When and on which devices a waiting job can start, if running jobs end as expected.

A reservation never gets worse from pass to pass, so the job starts in the end, however many small jobs are submitted.
With known ends its start never moves back. Without them the number of jobs that must still end never grows: freed
devices stay free for it, and it never waits for jobs that started later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ugro.kernel.jobs.scheduling.demand import Claim, Demand, Free, Held, Need, Room
from ugro.kernel.jobs.scheduling.model import Holding
from ugro.kernel.jobs.scheduling.placement import Ledger, Reservation

# --- jobs that are stopped for a more urgent one ----------------------------------------------------------------------
# They are preemptible and of lower priority, few, and the youngest first. No job is stopped unless the urgent job can
# then start.


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


# --- reservations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Opening:
    """A node that fits once ``ended`` have ended: at a known time, or after ``unknown`` jobs without a time limit."""

    room: Room
    ended: tuple[Held, ...]
    at: float = 0.0
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    need: Need
    openings: list[_Opening]
    start: float | None

    @property
    def cost(self) -> tuple[bool, float]:
        if self.start is not None:
            return (False, self.start)
        return (True, sum(opening.unknown for opening in self.openings))


def reservation_for(job: int, demand: Demand, ledger: Ledger) -> Reservation | None:
    """The earliest; among equals the preferred alternative. None if the job does not fit even after all jobs ended."""
    plans = [plan for need in demand.needs if (plan := _plan(need, ledger)) is not None]
    if not plans:
        return None
    best = min(plans, key=lambda plan: plan.cost)
    claims = tuple(_claim(best.need, opening) for opening in best.openings)
    return Reservation(job, 1 << len(ledger.reservations), best.need, claims, best.start)


def _plan(need: Need, ledger: Ledger) -> _Plan | None:
    openings = [_Opening(room, (), ledger.now) for _, _, rooms in ledger.alike(need, 0) for room in rooms]
    for opening in _openings_by_time(need, ledger, {opening.room for opening in openings}):
        openings.append(opening)
        # All nodes that become free at the same time count: the faster ones are preferred below.
        if len(openings) > need.min_nodes and opening.at > openings[need.min_nodes - 1].at:
            break
    if len(openings) >= need.min_nodes:
        openings.sort(key=lambda opening: (opening.at, *_preference(need, opening.room)))
        chosen = openings[: need.min_nodes]
        return _Plan(need, chosen, chosen[-1].at)
    openings += _openings_some_day(need, ledger, {opening.room for opening in openings})
    if len(openings) < need.min_nodes:
        return None
    openings.sort(key=lambda opening: (opening.unknown, *_preference(need, opening.room)))
    return _Plan(need, openings[: need.min_nodes], None)


def _openings_by_time(need: Need, ledger: Ledger, known: set[Room]) -> Iterator[_Opening]:
    """The nodes that will fit as jobs with a known end finish, the earliest first."""
    capable = set(ledger.capable(need)) - known
    ended: dict[Room, list[Held]] = {}
    for end, job in ledger.ends:
        for room, held in ledger.parts[job]:
            if room not in capable:
                continue
            gone = ended.setdefault(room, [])
            gone.append(held)
            if need.fits(room.shape, room.open_after(gone)):
                capable.discard(room)
                yield _Opening(room, tuple(gone), end)


def _openings_some_day(need: Need, ledger: Ledger, known: set[Room]) -> Iterator[_Opening]:
    """The nodes that fit once jobs without a known end have ended, too, the oldest of those first."""
    for room in ledger.capable(need):
        if room in known:
            continue
        gone = [held for held in room.held if held.holder.id in ledger.known_end]
        unknown = [held for held in room.held if held.holder.id not in ledger.known_end]
        for count, held in enumerate(sorted(unknown, key=_age), start=1):
            gone.append(held)
            if need.fits(room.shape, room.open_after(gone)):
                yield _Opening(room, tuple(gone), unknown=count)
                break


def _claim(need: Need, opening: _Opening) -> Claim:
    room = opening.room
    needed = list(opening.ended)
    for held in opening.ended:
        others = [other for other in needed if other is not held]
        if need.fits(room.shape, room.open_after(others)):
            needed = others
    state = room.open_after(needed)
    return Claim(room, tuple(needed), state, need.part_of(room.shape, state))


def _age(held: Held) -> tuple[float, int]:
    started_at = held.holder.started_at
    return (float("inf") if started_at is None else started_at, held.holder.id)


def _preference(need: Need, room: Room) -> tuple[bool, bool, int, float, str]:
    return (*need.drawbacks(room.shape), -room.node.speed, room.node.name)
