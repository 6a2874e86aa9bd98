"""Where the door of a service is: a node, an address that all nodes of its replicas reach, and a port that is free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ugro.agent.engine.rendezvous import PortTaken, find_meeting
from ugro.agent.support.aio import together
from ugro.agent.tracking import node_checks
from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import NotAllowed, UgroError, Unreachable, Unsatisfiable
from ugro.core.node import Machine, Role
from ugro.core.service import DoorPlace, Service, ServiceSpec
from ugro.nodes.link import Link
from ugro.policy.nodes.connectivity import LOOPBACK, Apart, Meeting
from ugro.policy.serving.door_move import Candidate, in_order, next_nodes
from ugro.remote.clock import boot_id

_TEST_PORTS = range(9900, 9905)  # for a moment, to see who reaches whom


class DoorPlaces:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # By the key of a service and the door's node: the nodes that reached it at its address.
        self._met: dict[tuple[str, str], frozenset[str]] = {}

    async def choose(self, wanted: str | None, spec: ServiceSpec, nodes: Sequence[str]) -> DoorPlace:
        """``nodes``: those that replicas may use. Raises UgroError if the port is taken, or nodes are apart."""
        return await self._at(wanted or in_order(self._known(), nodes)[0], spec, nodes)

    async def move(self, service: Service, nodes: Sequence[str], *, has_failed: bool) -> DoorPlace:
        """Its next place, when its node was lost. ``has_failed``: it could not be started at the present one."""
        tried = next_nodes(self._known(), nodes, service.door, has_failed=has_failed)
        problem: UgroError = Unreachable("no node can be reached that could have the door", subject=service.name)
        for name in tried:
            try:
                return await self._at(name, service.spec, nodes)
            except UgroError as error:
                problem = error
        raise problem

    def _known(self) -> list[Candidate]:
        return [
            Candidate(
                node.spec.name, node.spec.transport == "local", node.spec.role is Role.MASTER, node.link is not None
            )
            for node in self._cluster.inventory
        ]

    async def _at(self, name: str, spec: ServiceSpec, nodes: Sequence[str]) -> DoorPlace:
        node = self._cluster.inventory.named(name)
        link = await node.ready(2 * self._cluster.config.ssh.connect_timeout)
        address = await self._address(link, [name for name in nodes if name != node.spec.name], spec)
        is_here = _machine(link).boot_id == boot_id()
        return DoorPlace(node.spec.name, _machine(link).python_path, address, is_here)

    async def address_now(self, service: Service, nodes: Sequence[str]) -> str:
        """A door that was alone has the address of loopback: when other nodes are there, they need another one.

        Raises Unreachable if that cannot be found out now.
        """
        place, key = service.door, (service.key, service.door.node)
        known = [self._cluster.inventory.get(name) for name in nodes if name != place.node]
        link = self._cluster.inventory.get(place.node).link
        links = [one.link for one in known if one.link is not None]
        names = frozenset(one.spec.name for one in links)
        if place.address == LOOPBACK and link is None:
            raise Unreachable("the door's node cannot be reached: the next replicas wait for it", subject=place.node)
        if place.address != LOOPBACK or names <= self._met.get(key, frozenset()):
            return place.address
        assert link is not None
        found = await self._meet([link, *links])
        if isinstance(found, Apart):
            raise Unsatisfiable(f"the door cannot reach all replicas: {found.text}", hint=found.hint)
        self._met[key] = names
        return found.address

    async def _meet(self, links: Sequence[Link]) -> Meeting | Apart:
        for port in _TEST_PORTS:
            with suppress(PortTaken):
                return await find_meeting(links, [node_checks.endpoint(one) for one in links], port)
        raise NotAllowed(f"ports {_TEST_PORTS[0]} to {_TEST_PORTS[-1]} are taken on {links[0].spec.name}")

    async def _address(self, link: Link, others: Sequence[str], spec: ServiceSpec) -> str:
        found = await together(self._open(name) for name in others)
        links = [link, *(one for one in found if one is not None)]
        endpoints = [node_checks.endpoint(one) for one in links]
        if not links[1:]:
            async with node_checks.mesh(links, endpoints, spec.port) as alone:
                if alone.taken_ports:
                    raise _taken(link, spec.port)
            return LOOPBACK
        try:
            meeting = await find_meeting(links, endpoints, spec.port)
        except PortTaken as error:
            raise _taken(link, spec.port) from error
        if not isinstance(meeting, Apart):
            return meeting.address
        hint = f"{meeting.hint}; or leave nodes out: --only NODE; or put the door elsewhere: --door NODE"
        raise Unsatisfiable(f"the door cannot reach all replicas: {meeting.text}", hint=hint)

    async def _open(self, name: str) -> Link | None:
        """Nodes that are away now are not waited for."""
        try:
            return await self._cluster.inventory.get(name).ready(self._cluster.config.ssh.connect_timeout)
        except UgroError:
            return None


def _taken(link: Link, port: int) -> NotAllowed:
    name = link.spec.name
    hint = f"see who listens: ugro exec {name} -- ss -ltnp; choose another: --port PORT"
    return NotAllowed(f"port {port} is taken on {name}", hint=hint)


def _machine(link: Link) -> Machine:
    assert link.machine is not None  # the link is open
    return link.machine
