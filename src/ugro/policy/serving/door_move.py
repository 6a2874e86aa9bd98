"""Where the door of a service goes: first, and again when its node was lost. Pure.

A door that moves answers at another machine. Its old one is dead by then, or its lease has run out on its node, so no
two doors answer at one address.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ugro.core.service import DoorPlace, Service, ServiceSpec
from ugro.core.support.loopback import is_loopback

WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node, as far as it matters for a door."""

    name: str
    is_here: bool = False  # the agent's own machine
    is_master: bool = False
    is_reachable: bool = True


def in_order(known: Iterable[Candidate], replicas: Collection[str]) -> list[str]:
    """This machine, if it is a node; else the master, else the first of the replicas' nodes."""
    ranked = sorted(known, key=lambda one: (not one.is_here, not one.is_master, one.name not in replicas))
    return [one.name for one in ranked]


def next_nodes(
    known: Iterable[Candidate], replicas: Collection[str], place: DoorPlace, *, has_failed: bool
) -> list[str]:
    """Those to try. Its own node first, if that is back; last, if the door could not be started there."""
    names = in_order((one for one in known if one.is_reachable), replicas)
    own = [name for name in names if name == place.node]
    others = [name for name in names if name != place.node]
    return [*others, *own] if has_failed else [*own, *others]


def bind_at(spec: ServiceSpec, before: DoorPlace, after: DoorPlace) -> str:
    """An address of the lost node is not one of the next."""
    is_everywhere = spec.bind in WILDCARDS or is_loopback(spec.bind)
    return spec.bind if before.node == after.node or is_everywhere else after.address


def moved(service: Service, place: DoorPlace) -> Service:
    """With a door of the next number at this place."""
    before = service.door
    origin = before.moved_from if place.node == before.node else before.node
    door = replace(place, number=before.number + 1, moved_from="" if origin == place.node else origin)
    return replace(service, door=door, spec=replace(service.spec, bind=bind_at(service.spec, before, door)))
