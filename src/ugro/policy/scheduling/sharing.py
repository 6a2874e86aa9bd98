"""GPUs that jobs of one group share: the first takes a whole one, as every job does, and others may join it there.

Never two strangers: a GPU has one job, or jobs of one group. Nobody joins on a node on which something is reserved: a
job that comes later would keep the GPU from the job that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ugro.core.job import Placement, Sharing
from ugro.policy.scheduling.demand import Need
from ugro.policy.scheduling.ledger import Ledger
from ugro.policy.scheduling.room import Room


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
