"""When and on which devices a waiting job can start, if running jobs end as expected.

A reservation never gets worse from pass to pass, so the job starts in the end, however many small jobs are submitted.
With known ends its start never moves back. Without them the number of jobs that must still end never grows: freed
devices stay free for it, and it never waits for jobs that started later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ugro.policy.scheduling.demand import Demand, Need
from ugro.policy.scheduling.ledger import Ledger, Reservation
from ugro.policy.scheduling.room import Claim, Held, Room


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
