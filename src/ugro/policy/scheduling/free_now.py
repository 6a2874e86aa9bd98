"""How much of a job's need is free at this moment, in words that the ledger bears out.

Every answer about a waiting job takes them from here: ``ugro why``, ``status``, ``top``, ``--dry-run``, the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ugro.core.support.quantity import format_size
from ugro.policy.scheduling.demand import Need
from ugro.policy.scheduling.ledger import EVERYTHING, Ledger
from ugro.policy.scheduling.room import Room
from ugro.policy.wording import count_of, jobs, names


@dataclass(frozen=True, slots=True)
class FreeNow:
    text: str
    reserved_for: tuple[int, ...] = ()  # the waiting jobs that keep what is free, if it would be enough without them
    is_something: bool = True  # a part of it is free, or reserved


def free_now(need: Need, ledger: Ledger) -> FreeNow:
    """For a job that cannot start now, whatever it waits for."""
    open_rooms = _rooms(need, ledger, 0)
    taken = set(open_rooms)
    kept = [room for room in _rooms(need, ledger, EVERYTHING) if room not in taken]
    owners = _owners(need, kept, ledger)
    is_enough = len(open_rooms) + len(kept) >= need.min_nodes
    reserved_for = owners if is_enough else ()
    where = names([room.node.name for room in kept])
    if need.min_nodes > 1:
        text = f"{len(open_rooms)} of {need.min_nodes} are free now"
        more = f"; {where} {'is' if len(kept) == 1 else 'are'} free too, but reserved for {jobs(owners)}"
        return FreeNow(text + more if kept else text, reserved_for, bool(open_rooms or kept))
    if kept:
        return FreeNow(f"that is free on {where}, but reserved for {jobs(owners)}", reserved_for)
    nearly = _nearly(need, ledger)
    return FreeNow(nearly or "none is free now", is_something=nearly is not None)


def _rooms(need: Need, ledger: Ledger, allowed: int) -> list[Room]:
    found = [room for _, _, rooms in ledger.alike(need, allowed) for room in rooms]
    return sorted(found, key=lambda room: room.node.name)


def _owners(need: Need, kept: list[Room], ledger: Ledger) -> tuple[int, ...]:
    """The jobs whose reservations keep it out of those nodes."""
    bits = 0
    for room in kept:
        own = [one.reservation for one in room.kept if not need.fits(room.shape, room.free.within(one.spare))]
        # Several may keep a little each, and only together too much.
        bits |= sum(own or [one.reservation for one in room.kept])
    return tuple(one.job for one in ledger.reservations if one.bit & bits)


def _nearly(need: Need, ledger: Ledger) -> str | None:
    """Where a part of what one node must give is free; None if nothing of it is."""
    some = [(_much(need, room), room) for room in ledger.capable(need)]
    much, room = min(some, key=lambda one: (-one[0], one[1].node.name), default=(0, None))
    if room is None or not much:
        return None
    return f"no node has all of that free now: {room.node.name} has {names(list(_parts(need, room)))}"


def _much(need: Need, room: Room) -> int:
    """GPUs that would do or, if it needs none, cores."""
    if need.least_gpus:
        return ((need.fitting_gpus(room.shape) or 0) & room.free.gpus).bit_count()
    return max(0, room.free.cpus) if need.cpus else 0


def _parts(need: Need, room: Room) -> Iterator[str]:
    free, cpus = room.free, need.least_cpus(room.shape)
    if need.least_gpus:
        yield f"{_much(need, room)} of {count_of(need.least_gpus, 'GPU')}"
    if free.cpus < cpus:
        yield f"{max(0, free.cpus)} of {count_of(cpus, 'core')}"
    if free.memory_bytes < need.memory_bytes:
        yield f"{format_size(max(0, free.memory_bytes))} of {format_size(need.memory_bytes)} of memory"
    if free.slots < 1:
        yield "as many jobs as it takes at once"
