"""Whether nodes reach each other: who connects to whom, at which addresses, and what the outcome means.

``ugro doctor`` judges every pair; a launch also needs one address of the first node that all others reach, and the
network interface of each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address

from ugro.core.finding import Finding, Grade
from ugro.core.support.quantity import format_duration
from ugro.policy.nodes.examination import Unknown
from ugro.remote.messages import Connections, Reached, Target

LOOPBACK = "127.0.0.1"
# With more nodes, all pairs would be more connections than they are worth.
MAX_NODES_FOR_ALL_PAIRS = 12
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A node as other nodes may reach it."""

    node: str
    boot_id: str
    addresses: tuple[str, ...] = ()  # its own, IPv4, without loopback
    host: str = ""  # what the user's ssh dials
    wanted: str | None = None  # the address that the user wants ranks to meet at, if it is this node's


@dataclass(frozen=True, slots=True)
class Meeting:
    address: str
    interfaces: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Apart:
    text: str
    hint: str
    node: str  # the node to leave out, if that were possible


def pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Who connects to whom: every node to every other; of many, all to the first and each to the next one."""
    if len(nodes) <= MAX_NODES_FOR_ALL_PAIRS:
        return [(one, other) for one in nodes for other in nodes if one != other]
    ring = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return list(dict.fromkeys([*((node, nodes[0]) for node in nodes[1:]), *ring]))


def addresses_to_try(connector: Endpoint, listener: Endpoint) -> list[str]:
    """Best first. Loopback only leads to another node if both are on the same machine."""
    is_same_machine = listener.boot_id == connector.boot_id != ""
    candidates = [
        *([listener.wanted] if listener.wanted else []),
        # Containers on one machine have networks of their own; there, loopback is refused at once.
        *([LOOPBACK] if is_same_machine else []),
        *([listener.host] if _is_far(listener.host) else []),
        *listener.addresses,
    ]
    return list(dict.fromkeys(candidates))


def asked_for(found: Connections, targets: Iterable[Target]) -> Connections:
    """Without what nobody asked for: nodes listen and meet at these addresses, and a node may claim any."""
    asked = {(one.node, address, port) for one in targets for address in one.addresses for port in one.ports}
    reached = tuple(one for one in found.reached if (one.node, one.address, one.port) in asked)
    return Connections(reached, found.missed)


# --- ugro doctor ---------------------------------------------------------------------------------------------------


def judge_pairs(endpoints: Sequence[Endpoint], found: Mapping[str, Connections | Unknown]) -> list[Finding]:
    """One finding for each pair that does not work, or one that all do."""
    tried = pairs([endpoint.node for endpoint in endpoints])
    problems = list(_problems(tried, endpoints, found))
    if problems or not tried:
        return problems
    slowest_s = max(_connect_s(found[one], other) or 0.0 for one, other in tried)
    which = " that were tried" if len(tried) < len(endpoints) * (len(endpoints) - 1) else ""
    text = f"all {len(tried)} pairs{which} reach each other, connecting in at most {format_duration(slowest_s)}"
    return [Finding("cluster", "network", Grade.OK, text)]


def _problems(
    tried: Sequence[tuple[str, str]], endpoints: Sequence[Endpoint], found: Mapping[str, Connections | Unknown]
) -> Iterator[Finding]:
    for one, other in tried:
        pair, outcome = f"{one} → {other}", found[one]
        if _connect_s(outcome, other) is not None:
            continue
        unknown = next((end for end in (outcome, found[other]) if isinstance(end, Unknown)), None)
        if unknown is not None:
            yield Finding(pair, "network", Grade.WARNING, f"could not be tried: {unknown.text}", unknown.hint)
        elif isinstance(outcome, Connections):
            text = _cannot_connect(outcome, one, other)
            yield Finding(pair, "network", Grade.FAILED, text, _firewall(endpoints, one, other))


def _connect_s(outcome: Connections | Unknown, node: str) -> float | None:
    if isinstance(outcome, Unknown):
        return None
    return min((reached.connect_s for reached in outcome.reached if reached.node == node), default=None)


# --- a launch ------------------------------------------------------------------------------------------------------


def meet(endpoints: Sequence[Endpoint], port: int, found: Mapping[str, Connections]) -> Meeting | Apart:
    """``port`` is where the first node's rank will listen. Chooses its first address that all others reached."""
    first, *others = endpoints
    arrivals = {other.node: _arrivals(found[other.node], first.node, port) for other in others}
    if lonely := [other.node for other in others if not arrivals[other.node]]:
        return _apart([(node, first.node) for node in lonely], endpoints, found, port)
    common = [address for address in arrivals[others[0].node] if all(address in seen for seen in arrivals.values())]
    if not common:
        reached = "; ".join(f"{node} reaches it at {', '.join(seen)}" for node, seen in arrivals.items())
        hint = "connect all nodes to one network, or set cluster.master_ip to an address that all reach"
        return Apart(f"no address of {first.node} can be reached by all: {reached}", hint, first.node)
    interfaces = {other.node: arrivals[other.node][common[0]].interface for other in others}
    interfaces[first.node] = arrivals[others[0].node][common[0]].peer_interface
    broken = [
        (one, other)
        for one, other in pairs([endpoint.node for endpoint in endpoints])
        if not _is_reached(found[one], other, interfaces[other], port)
    ]
    if broken:
        return _apart(broken, endpoints, found, port)
    named = [(endpoint.node, interfaces[endpoint.node]) for endpoint in endpoints if interfaces[endpoint.node]]
    return Meeting(common[0], tuple(named))


def _arrivals(connections: Connections, node: str, port: int) -> dict[str, Reached]:
    """By address, in the order in which they were tried."""
    return {reached.address: reached for reached in connections.reached if (reached.node, reached.port) == (node, port)}


def _is_reached(connections: Connections, node: str, interface: str, port: int) -> bool:
    """At a port that is not reserved: ranks listen for each other at such ports once they have met."""
    return any(
        reached.node == node and reached.port != port and interface in ("", reached.peer_interface)
        for reached in connections.reached
    )


def _apart(
    broken: Sequence[tuple[str, str]], endpoints: Sequence[Endpoint], found: Mapping[str, Connections], port: int
) -> Apart:
    texts = [_cannot_connect(found[one], one, other, port) for one, other in broken[:_MAX_NAMED]]
    if len(broken) > _MAX_NAMED:
        texts.append(f"{len(broken) - _MAX_NAMED} more pairs cannot either")
    ends = [node for pair in broken for node in pair]
    hint = f"{_firewall(endpoints, *broken[0])}; check all pairs: ugro doctor"
    return Apart("; ".join(texts), hint, max(ends, key=ends.count))


# --- texts for both ------------------------------------------------------------------------------------------------


def _cannot_connect(connections: Connections, one: str, other: str, port: int | None = None) -> str:
    text = f"{one} cannot connect to {other}"
    missed = [missed for missed in connections.missed if missed.node == other]
    if {missed.port for missed in missed} == {port}:
        text += f" at port {port}"
    # That loopback does not lead to another machine is no news, if any other address was tried.
    far = [one for one in missed if one.address != LOOPBACK] or missed
    tried = list(dict.fromkeys(f"{one.address}: {one.error}" for one in far))
    return f"{text} ({'; '.join(tried[:_MAX_NAMED])})" if tried else f"{text}: it has no address to try"


def _firewall(endpoints: Sequence[Endpoint], one: str, other: str) -> str:
    own = (address for endpoint in endpoints if endpoint.node == one for address in endpoint.addresses)
    return f"if a firewall blocks {one} on {other}: sudo ufw allow from {next(own, 'ADDRESS')}"


def _is_far(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return isinstance(address, IPv4Address) and not address.is_loopback
