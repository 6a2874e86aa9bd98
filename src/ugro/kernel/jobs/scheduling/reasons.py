"""The reasons of the scheduler's decisions in words: why a job starts, or what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ugro.features.power.model import PowerState
from ugro.kernel.jobs.model import Share
from ugro.kernel.jobs.scheduling.demand import Demand, Free, Need, Room, Shape
from ugro.kernel.jobs.scheduling.model import Holding, NodeView
from ugro.kernel.jobs.scheduling.placement import Ledger, Placed, Reservation
from ugro.kernel.support.quantities import count_of, format_duration, format_size, in_words, jobs, names

# --- how much of a need is free now -----------------------------------------------------------------------------------
# The ledger bears these words out. Every answer about a waiting job takes them from here: ``ugro why``, ``status``,
# ``top``, ``--dry-run``, the dashboard.


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


# --- reasons ----------------------------------------------------------------------------------------------------------


# How many blocking jobs are named.
_MOST_BLOCKERS = 8
_MOST_LOOKED_AT = 200


@dataclass(frozen=True, slots=True)
class Blocked:
    reason: str
    by: tuple[int, ...] = ()
    until: float | None = None


def start_reason(need: Need, placed: Placed, ledger: Ledger, allowed: int, end: float | None) -> str:
    """``end``: the latest time at which it ends, which is why it may use the reservations in ``allowed``."""
    placement = placed.placement
    where = f"free now: {names([given(share) for share in placement.shares])}"
    full = [f"{name} {no_room}" for name in placement.nodes if (no_room := ledger.rooms[name].node.no_room) is not None]
    reason = "; ".join(part for part in (where, placed.preference, need.notes, *full) if part)
    if not ledger.reservations:
        return reason
    borrowed = [one.job for one in ledger.reservations if one.bit & allowed and one.overlaps(placement)]
    if borrowed and end is not None:
        gone = format_duration(end - ledger.now)
        return f"{reason}; it ends within {gone}, before {jobs(borrowed)} can start there"
    waiting = [one.job for one in ledger.reservations]
    return f"{reason}; fills a gap: {jobs(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for other devices"


def waits_for_holders(reservation: Reservation, victims: Sequence[Holding], ledger: Ledger) -> Blocked:
    """For one of the first jobs in the queue, with devices reserved for it."""
    need, holders = reservation.need, reservation.holders
    reason = f"needs {need}; {free_now(need, ledger).text}; "
    if victims:
        stopped = [victim.id for victim in victims]
        reason += f"{jobs(stopped)} of lower priority {_is(stopped)} being stopped for it"
    else:
        waited_for = [claim.room.node.name for claim in reservation.claims if claim.ended]
        reason += f"waits for {jobs(holders)} on {names(waited_for)}"
    if reservation.start is None:
        endless = [job for job in holders if job not in ledger.known_end]
        reason += f"; unknown for how long, because {jobs(endless)} {_has(endless)} no time limit"
    else:
        reason += f", for {format_duration(reservation.start - ledger.now)} at most"
    return Blocked(reason, holders[:_MOST_BLOCKERS], reservation.start)


def waits_for_sleepers(need: Need, sleepers: Sequence[NodeView], now: float) -> Blocked:
    """For a job that has all it needs, on nodes of which some are not awake."""
    latest = max(node.asleep.latest(now) for node in sleepers if node.asleep is not None)
    return Blocked(f"needs {need}; {'; '.join(_waking(node, now) for node in sleepers)}", until=latest)


def _waking(node: NodeView, now: float) -> str:
    asleep = node.asleep
    assert asleep is not None
    if asleep.state is PowerState.WAKING:
        return f"waking {node.name} (since {format_duration(max(0.0, now - asleep.since_s))})"
    if asleep.state is PowerState.GOING_TO_SLEEP:
        return f"{node.name} is going to sleep and is woken then"
    return f"{node.name} is asleep and is being woken"


def waits_for_others(demand: Demand, ledger: Ledger) -> Blocked:
    """For a job that is not among the first, or for which nothing could be reserved."""
    capable = [ledger.count_capable(need) for need in demand.needs]
    if all(count < need.min_nodes for need, count in zip(demand.needs, capable, strict=True)):
        return Blocked(f"needs {demand}; {_too_few(demand, ledger, max(capable))}")
    found = [(need, free_now(need, ledger)) for need in demand.needs]
    for need, free in found:
        if free.reserved_for:
            return Blocked(f"needs {need}; {free.text}", free.reserved_for)
    nearest = next((free for _, free in found if free.is_something), found[0][1])
    return Blocked(f"needs {demand}; {nearest.text}", _blockers(demand, ledger))


def what_is_left_out(nodes: Sequence[NodeView], imports: Collection[str] = (), user: str = "") -> Iterator[str]:
    """``imports``: of the job's script. ``user``: whose it is."""
    away = [f"{node.name} {node.unusable}" for node in nodes if node.unusable is not None]
    if away:
        yield names(away)
    closed = [(node.name, node.objection_to(user)) for node in nodes if node.unusable is None]
    if words := [f"{name} {one.reason}" for name, one in closed if one is not None]:
        yield names(words)
    gpus = [(f"GPU {gpu.index} of {node.name}", gpu) for node in nodes for gpu in node.gpus if gpu.is_foreign]
    yield from (f"{name} is used by {gpu.holder}" for name, gpu in gpus if gpu.holder is not None)
    foreign = [name for name, gpu in gpus if gpu.holder is None]
    if foreign:
        yield f"others use {names(foreign)}"
    full = [f"{node.name} {node.no_room}" for node in nodes if node.no_room is not None]
    if full:
        yield names(full)
    lacking = [(node.name, sorted(node.lacks.intersection(imports))) for node in nodes]
    if any(missing for _, missing in lacking):
        yield names([f"{name} lacks {in_words(missing)}" for name, missing in lacking if missing])


def given(share: Share) -> str:
    if not share.gpus:
        return share.node
    indices = in_words([str(index) for index in share.gpus])
    return f"{share.node} ({'GPU' if len(share.gpus) == 1 else 'GPUs'} {indices})"


def _too_few(demand: Demand, ledger: Ledger, capable: int) -> str:
    least = min(need.min_nodes for need in demand.needs)
    found = f"only {capable} of {least} usable nodes can give that" if capable else "no usable node has that"
    imports = {name for need in demand.needs for name in need.imports}
    user = demand.needs[0].user
    return "; ".join([found, *what_is_left_out(ledger.nodes, imports, user)])


def _blockers(demand: Demand, ledger: Ledger) -> tuple[int, ...]:
    """The jobs on devices that it could use, the first to end first."""
    capable = {room for need in demand.needs for room in ledger.capable(need)}
    endless = [job for job in ledger.holdings if job not in ledger.known_end]
    order = [*(job for _, job in ledger.ends[:_MOST_LOOKED_AT]), *endless[:_MOST_LOOKED_AT]]
    found = [job for job in order if any(room in capable for room, _ in ledger.parts[job])]
    return tuple(found[:_MOST_BLOCKERS])


def _has(things: Sequence[object]) -> str:
    return "has" if len(things) == 1 else "have"


def _is(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"
