"""How much of a job's need is free at this moment, in words that the ledger bears out.

Every answer about a waiting job takes them from here: ``ugro why``, ``status``, ``top``, ``--dry-run``, the dashboard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ugro.core.support.quantity import format_size
from ugro.policy.scheduling.demand import Need
from ugro.policy.scheduling.ledger import Ledger
from ugro.policy.scheduling.room import Free, Room, Shape
from ugro.policy.wording import count_of, jobs, names


@dataclass(frozen=True, slots=True)
class FreeNow:
    text: str
    reserved_for: tuple[int, ...] = ()  # the waiting jobs that keep what is free, if it would be enough without them
    is_something: bool = True  # a part of it is free, or reserved


def free_now(need: Need, ledger: Ledger) -> FreeNow:
    """For a job that cannot start now, whatever it waits for."""
    count, kept = _open_and_kept(need, ledger)
    owners = _owners(need, kept, ledger)
    reserved_for = owners if count + len(kept) >= need.min_nodes else ()
    where = names(sorted(room.node.name for room in kept))
    if need.min_nodes == 1 and kept:
        return FreeNow(f"that is free on {where}, but reserved for {jobs(owners)}", reserved_for)
    nearly = _nearly(need, ledger) if not count and not kept else None
    if need.min_nodes == 1:
        text = f"no node has all of that free now: {nearly}" if nearly else "none is free now"
        return FreeNow(text, is_something=nearly is not None)
    text = f"{count} of {need.min_nodes} are free now"
    if kept:
        text += f"; {where} {'is' if len(kept) == 1 else 'are'} free too, but reserved for {jobs(owners)}"
    elif nearly:
        text += f": {nearly}"
    return FreeNow(text, reserved_for, bool(count or kept or nearly))


def _open_and_kept(need: Need, ledger: Ledger) -> tuple[int, list[Room]]:
    """How many nodes could give it now, and the nodes on which only reservations are in the way."""
    count, kept = 0, []
    for shape, free, rooms in ledger.all_alike():
        if need.fits(shape, free):
            closed = [room for room in rooms if room.kept and not need.fits(shape, room.open_to(0))]
            count += len(rooms) - len(closed)
            kept += closed
    return count, kept


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
    groups: dict[int, list[Room]] = defaultdict(list)
    for shape, free, rooms in ledger.all_alike():
        if much := _much(need, shape, free):
            groups[much] += rooms
    for much in sorted(groups, reverse=True):
        capable = [room for room in groups[much] if need.fits(room.shape, room.capacity)]
        if capable:
            room = min(capable, key=lambda room: room.node.name)
            return f"{room.node.name} has {names(list(_parts(need, room)))}"
    return None


def _much(need: Need, shape: Shape, free: Free) -> int:
    """GPUs that would do or, if it needs none, cores."""
    if need.least_gpus:
        return ((need.fitting_gpus(shape) or 0) & free.gpus).bit_count()
    return max(0, free.cpus) if need.cpus else 0


def _parts(need: Need, room: Room) -> Iterator[str]:
    free, cpus = room.free, need.least_cpus(room.shape)
    if need.least_gpus:
        yield f"{_much(need, room.shape, free)} of {count_of(need.least_gpus, 'GPU')}"
    if free.cpus < cpus:
        yield f"{max(0, free.cpus)} of {count_of(cpus, 'core')}"
    if free.memory_bytes < need.memory_bytes:
        yield f"{format_size(max(0, free.memory_bytes))} of {format_size(need.memory_bytes)} of memory"
    if free.slots < 1:
        yield "as many jobs as it takes at once"
