"""Where the ranks of a job meet: at which address, over which interface of each node, or who cannot reach whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address

LOOPBACK = "127.0.0.1"
# With more, all pairs would be more connections than they can tell us.
MOST_NODES_FOR_ALL_PAIRS = 12
_MOST_TOLD = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A node as others may try to reach it."""

    node: str
    boot_id: str
    addresses: tuple[str, ...] = ()  # its own, IPv4, without loopback
    host: str = ""  # what the user's ssh dials
    wanted: str | None = None  # the address that the user wants ranks to meet at, if it is this node's


@dataclass(frozen=True, slots=True)
class Reached:
    node: str
    port: int
    address: str
    interface: str  # that the connection left by; empty where that is not known
    peer_interface: str  # that it came in by
    connect_s: float


@dataclass(frozen=True, slots=True)
class Missed:
    node: str
    port: int
    address: str
    error: str


@dataclass(frozen=True, slots=True)
class Crossing:
    """What became of one node's attempts to connect to others."""

    reached: tuple[Reached, ...] = ()
    missed: tuple[Missed, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    address: str
    interfaces: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Apart:
    text: str
    hint: str
    node: str  # the one to do without, if that were possible


def pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Who tries to connect to whom: everybody to everybody, or, of many, all to the first and around a ring."""
    if len(nodes) <= MOST_NODES_FOR_ALL_PAIRS:
        return [(one, other) for one in nodes for other in nodes if one != other]
    ring = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return list(dict.fromkeys([*((node, nodes[0]) for node in nodes[1:]), *ring]))


def addresses_to_try(connector: Place, listener: Place) -> list[str]:
    """Best first. A loopback address leads everywhere to oneself, so it is for those on one machine only."""
    is_same_machine = listener.boot_id == connector.boot_id != ""
    candidates = [
        *([listener.wanted] if listener.wanted else []),
        # One machine may still be several networks (containers): tried like any other, and at once refused there.
        *([LOOPBACK] if is_same_machine else []),
        *([listener.host] if _is_far(listener.host) else []),
        *listener.addresses,
    ]
    return list(dict.fromkeys(candidates))


def meet(places: Sequence[Place], port: int, crossings: Mapping[str, Crossing]) -> Meeting | Apart:
    """``port`` is where the first node's rank will listen. Of its addresses, the first that all others reached."""
    first, *others = places
    arrivals = {other.node: _arrivals(crossings[other.node], first.node, port) for other in others}
    if lonely := [other.node for other in others if not arrivals[other.node]]:
        return _apart([(node, first.node) for node in lonely], places, crossings, port)
    common = [address for address in arrivals[others[0].node] if all(address in seen for seen in arrivals.values())]
    if not common:
        reached = "; ".join(f"{node} reaches it at {', '.join(seen)}" for node, seen in arrivals.items())
        hint = "give all of them a network in common, or name one address that all reach: cluster.master_ip"
        return Apart(f"no address of {first.node} is reached by all: {reached}", hint, first.node)
    interfaces = {other.node: arrivals[other.node][common[0]].interface for other in others}
    interfaces[first.node] = arrivals[others[0].node][common[0]].peer_interface
    broken = [
        (one, other)
        for one, other in pairs([place.node for place in places])
        if not _is_reached(crossings[one], other, interfaces[other], port)
    ]
    if broken:
        return _apart(broken, places, crossings, port)
    return Meeting(common[0], tuple((place.node, interfaces[place.node]) for place in places if interfaces[place.node]))


def _arrivals(crossing: Crossing, node: str, port: int) -> dict[str, Reached]:
    """By address, in the order they were tried in."""
    return {reached.address: reached for reached in crossing.reached if (reached.node, reached.port) == (node, port)}


def _is_reached(crossing: Crossing, node: str, interface: str, port: int) -> bool:
    """At a port that nobody reserved: that is where ranks listen for each other, once they have met."""
    return any(
        reached.node == node and reached.port != port and interface in ("", reached.peer_interface)
        for reached in crossing.reached
    )


def _apart(
    broken: Sequence[tuple[str, str]], places: Sequence[Place], crossings: Mapping[str, Crossing], port: int
) -> Apart:
    told = [
        f"{one} cannot connect to {other}{_errors(crossings[one], other, port)}" for one, other in broken[:_MOST_TOLD]
    ]
    if len(broken) > _MOST_TOLD:
        told.append(f"{len(broken) - _MOST_TOLD} more pairs cannot either")
    one, other = broken[0]
    source = next((address for place in places if place.node == one for address in place.addresses), "ADDRESS")
    ends = [node for pair in broken for node in pair]
    return Apart(
        "; ".join(told),
        f"a firewall? let {one} through on {other}: sudo ufw allow from {source}; all pairs at once: ugro doctor",
        max(ends, key=ends.count),
    )


def _errors(crossing: Crossing, node: str, port: int) -> str:
    missed = [missed for missed in crossing.missed if missed.node == node]
    where = f" at port {port}" if {missed.port for missed in missed} == {port} else ""
    # That loopback does not lead to another machine is no news, if there was anything else to try.
    far = [one for one in missed if one.address != LOOPBACK] or missed
    tried = list(dict.fromkeys(f"{one.address}: {one.error}" for one in far))
    return f"{where} ({'; '.join(tried[:_MOST_TOLD])})" if tried else ": it has no address that could be tried"


def _is_far(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return isinstance(address, IPv4Address) and not address.is_loopback
