"""What is found out before a Ray cluster starts: its nodes, whether they agree, its ports, and the head's address.

Nothing is recorded or started here. What is wrong is one error that names the node.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ugro.features.environments.model import EnvProgress, EnvRequest
from ugro.features.environments.service.service import PythonEnvService
from ugro.features.ray.config import RaySection
from ugro.features.ray.jobs import inside, rank_argv, rank_env, worker_resources
from ugro.features.ray.model import ClusterWish, Head, RayCluster, Worker
from ugro.features.ray.rules import (
    Look,
    Place,
    candidates,
    first_workers,
    free_port,
    lack_of_connection,
    lack_of_memory,
    note,
    objection,
)
from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.config.section import is_user
from ugro.kernel.jobs.engine.preflight import PortTaken, find_meeting
from ugro.kernel.jobs.model import JobSpec, Launcher, Resources
from ugro.kernel.jobs.service import JobService
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.calls import Stream, asked
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import LOOPBACK, Apart
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Machine, Role
from ugro.kernel.links.node import Node
from ugro.kernel.support.aio import together
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, Unsatisfiable
from ugro.node import foreign, wire
from ugro.node.process.execute import execute

# --- node looks -------------------------------------------------------------------------------------------------------
# Asks nodes what is to be known before Ray starts on them, and has them remove what killed ranks have left.
#
# Both are short runs of the program that the ranks of a cluster run (``features.ray.on_node``), over the nodes' links.


_LOOK_S = 30.0
_MOST_BYTES = 64 * 1024


async def look_at(
    links: Mapping[str, Link], pythons: Mapping[str, str], ports: Sequence[int], reach: tuple[str, int] | None = None
) -> dict[str, Look]:
    """By node, all at once.

    ``ports``: those that may be taken; ``reach``: an address and a port where something listens.
    """
    settings = {"role": "look", "ports": list(ports), "reach": reach}
    answers = await together(_ask(link, pythons[node], settings) for node, link in links.items())
    return {node: _look(links[node], answer) for node, answer in zip(links, answers, strict=True)}


async def clean(link: Link, python: str, key: str, state_folder: str | None) -> None:
    await _ask(link, python, {"role": "clean", "id": key, "state": state_folder})


def _look(link: Link, answer: object) -> Look:
    try:
        return decode(Look, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid answer: {error}", subject=link.spec.name) from error


async def _ask(link: Link, python: str, settings: Mapping[str, Any]) -> object:
    argv, marker = [*rank_argv(python, str(settings["role"]))], f"{link.spec.name}.{secrets.token_hex(6)}"
    stream = link.stream(*asked(execute, argv=argv, env=rank_env(settings), grace_s=5.0, marker=marker))
    try:
        async with asyncio.timeout(_LOOK_S):
            said, code = await _heard(stream)
    except TimeoutError as error:
        raise TimedOut(f"did not answer within {_LOOK_S:g} s", subject=link.spec.name) from error
    try:
        return foreign.parsed(said[wire.OUT].rpartition(b"\n")[0].rpartition(b"\n")[2])
    except ValueError as error:
        lines = (said[wire.ERR] or said[wire.OUT]).decode("utf-8", "replace").strip().splitlines()
        complaint = lines[-1][:300] if lines else f"exit code {code}"
        raise RemoteFailure(f"{python} cannot say what it has: {complaint}", subject=link.spec.name) from error


async def _heard(stream: Stream) -> tuple[dict[int, bytes], object]:
    said = {wire.OUT: b"", wire.ERR: b""}
    try:
        async for kind, payload in stream:
            said[kind] = (said[kind] + payload)[-_MOST_BYTES:]
        return said, (await stream.result()).get("code")
    finally:
        stream.cancel()


# --- starting ---------------------------------------------------------------------------------------------------------


_PORTS_TRIED = 3
Say = Callable[[str], None]
Speeds = Callable[[], Mapping[str, float]]
LoginOf = Callable[[Node, str], str]  # through which a user's jobs are started on a node; or the node itself


@dataclass(frozen=True, slots=True)
class Request:
    wish: ClusterWish
    user: str
    environment: EnvRequest | None
    used_ports: frozenset[int]  # by other clusters of this agent


class Starting:
    def __init__(
        self, cluster: Cluster, jobs: JobService, envs: PythonEnvService, speeds: Speeds, login_of: LoginOf
    ) -> None:
        self._cluster = cluster
        self._login_of = login_of
        self._jobs = jobs
        self._envs = envs
        self._speeds = speeds

    async def prepare(self, request: Request, say: Say) -> RayCluster:
        """A cluster that can be started, not recorded yet. Raises UgroError."""
        wish = request.wish
        nodes = await self._nodes(wish, request.user)
        head_node = wish.head or self._best_head(nodes)
        everywhere = list(dict.fromkeys((head_node, *nodes)))
        links = await self._links(everywhere, request.user)
        places = await self.places(nodes, links)
        workers = first_workers(wish, places)
        await self.expect_allowed(wish, workers, request.user)
        pythons = await self._pythons(request.environment, links, say)
        say("comparing the nodes")
        head, looks = await self._head(request, head_node, links, pythons)
        if (difference := note(looks)) is not None:
            say(difference)
        return RayCluster(
            id=0,
            key=head.state_folder.rpartition("/")[2],
            user=request.user,
            wish=wish,
            head=head,
            token=secrets.token_hex(32),
            workers=tuple(replace(worker, python=pythons[worker.node]) for worker in workers),
            environment=request.environment,
            ray_version=looks[head_node].ray or "",
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    async def expect_allowed(self, wish: ClusterWish, workers: Sequence[Worker], user: str) -> None:
        """Raises NotAllowed if a quota would never let all of them run."""
        base = JobSpec(wish.name, ("ray",), priority=wish.priority, time_limit_s=wish.time_limit_s)
        jobs = [replace(base, resources=worker_resources(wish.size, worker)) for worker in workers]
        head = replace(base, resources=Resources(cpus=0))
        await self._jobs.expect_all_allowed([head, *jobs], user, "the cluster")

    async def more(self, cluster: RayCluster, nodes: Sequence[str]) -> dict[str, str]:
        """For workers on other nodes than before: the Python of each. They must agree with the head, and reach it."""
        everywhere = list(dict.fromkeys((cluster.head.node, *nodes)))
        links = await self._links(everywhere, cluster.user)
        pythons = await self._pythons(cluster.environment, links, lambda text: None)
        head = (cluster.head.address, cluster.head.port)
        looks = await look_at(links, pythons, (), head)
        lack = lack_of_memory(cluster.wish, looks) or lack_of_connection(looks, f"{head[0]}:{head[1]}")
        _raise(objection(looks, {} if cluster.environment else pythons) or lack)
        return pythons

    def is_personal(self, cluster: RayCluster) -> bool:
        """Whether what is run on it runs in an account of its user's own."""
        used = {cluster.head.node, *(worker.node for worker in cluster.workers)}
        nodes = [node for node in self._cluster.inventory if node.spec.name in used]
        return any(self._login_of(node, cluster.user) != node.spec.name for node in nodes)

    async def usable(self, wish: ClusterWish) -> list[str]:
        """Every node that its workers may use, if they were idle."""
        spec = self._spec(replace(wish, nodes=None, size=replace(wish.size, cpus=wish.size.cpus or 1)), 1)
        return list((await self._jobs.place_idle(spec)).nodes)

    async def places(self, nodes: Sequence[str], links: Mapping[str, Link] | None = None) -> list[Place]:
        links = links or dict(zip(nodes, await together(map(self._own_link, nodes)), strict=True))
        speeds = self._speeds()
        found = [(node, _machine(links[node])) for node in nodes]
        return [Place(node, machine.cores, machine.python_path, speeds.get(node)) for node, machine in found]

    # --- where ---------------------------------------------------------------------------------------------------

    async def _nodes(self, wish: ClusterWish, user: str) -> list[str]:
        """Those that are free now, if there are enough; else those that it would get if all were idle."""
        for word in (*wish.only, *((wish.head,) if wish.head else ())):
            self._cluster.inventory.named(word)
        spec = self._spec(wish, wish.workers_per_node)
        if wish.nodes is not None:
            found = await self._jobs.preview(spec, user)
            if found.placement is not None:
                return list(found.placement.nodes)
        return list((await self._jobs.place_idle(spec)).nodes)

    def _spec(self, wish: ClusterWish, workers: int) -> JobSpec:
        """As if all were one job with a part on each node."""
        most = len(list(self._cluster.inventory))
        size = wish.size
        wanted = Resources(
            min_nodes=wish.nodes or 1,
            max_nodes=wish.nodes or max(1, most),
            gpus_per_node=workers * size.gpus,
            cpus=workers * size.cpus if size.cpus is not None else None,
            memory_bytes=workers * size.reserved_bytes,
            labels=wish.labels,
            only=wish.only,
        )
        limit_s = wish.time_limit_s
        return JobSpec(
            wish.name, ("ray",), Launcher.DDP, resources=wanted, priority=wish.priority, time_limit_s=limit_s
        )

    def _best_head(self, nodes: Sequence[str]) -> str:
        roles = {node: self._cluster.inventory.get(node).spec.role for node in nodes}
        return next((node for node, role in roles.items() if role is Role.MASTER), nodes[0])

    async def _links(self, nodes: Sequence[str], user: str) -> dict[str, Link]:
        """By node; to the account in which the user's jobs run there."""
        found = await together(self._link(node, user) for node in nodes)
        return dict(zip(nodes, found, strict=True))

    async def _link(self, node: str, user: str) -> Link:
        link = await self._own_link(node)  # who logs in there is known from now on
        if (name := self._login(node, user)) == node:
            return link
        account = account_of(name)
        login = self._cluster.inventory.open_login(name) if is_user(account) and "@" not in account else None
        if login is None:
            raise Unsatisfiable(f"there is no account for {user}: {account!r:.80}", subject=node)
        return await login.ready(self._limit_s, patiently=True)

    async def _own_link(self, node: str) -> Link:
        return await self._cluster.inventory.named(node).ready(self._limit_s)

    @property
    def _limit_s(self) -> float:
        return 2 * self._cluster.config.ssh.connect_timeout

    def _login(self, node: str, user: str) -> str:
        return self._login_of(self._cluster.inventory.named(node), user)

    async def _pythons(self, request: EnvRequest | None, links: Mapping[str, Link], say: Say) -> dict[str, str]:
        if request is None:
            return {node: _machine(link).python_path for node, link in links.items()}

        def progress(node: str, step: EnvProgress) -> None:
            say(f"{node_of(node)}: {step.phase}")

        made = await self._envs.ensure(request, [link.spec.name for link in links.values()], progress)
        return {node: made[link.spec.name].python for node, link in links.items()}

    # --- the head ------------------------------------------------------------------------------------------------

    async def _head(
        self, request: Request, node: str, links: Mapping[str, Link], pythons: Mapping[str, str]
    ) -> tuple[Head, dict[str, Look]]:
        ray, key = self._cluster.config.section(RaySection), secrets.token_hex(4)
        ports = [port for first in (ray.redis_port, ray.dashboard_port, ray.client_port) for port in candidates(first)]
        looks = await look_at(links, pythons, ports)
        _raise(objection(looks, {} if request.environment else pythons) or lack_of_memory(request.wish, looks))
        taken = [*looks[node].taken_ports, *request.used_ports]
        dashboard = free_port(
            ray.dashboard_port, "dashboard_port" in ray.given_keys, taken, "ray.dashboard_port", node
        )
        taken.append(dashboard)
        client = free_port(ray.client_port, "client_port" in ray.given_keys, taken, "ray.client_port", node)
        address, port = await self._address(links, [*taken, client], ray, node)
        folder = f"{_machine(links[node]).root}/.ugro/ray/{key}"
        return Head(node, pythons[node], address, port, dashboard, folder, client), looks

    async def _address(
        self, links: Mapping[str, Link], taken: Sequence[int], ray: RaySection, node: str
    ) -> tuple[str, int]:
        """An address of the head that every node reaches, and a port at which nobody listens."""
        known = list(taken)
        for _ in range(_PORTS_TRIED):
            port = free_port(ray.redis_port, "redis_port" in ray.given_keys, known, "ray.redis_port", node)
            try:
                return await self._meeting(links, port), port
            except PortTaken:
                known.append(port)
        raise Unsatisfiable(f"{_PORTS_TRIED} ports in a row were free and then taken", subject=node)

    async def _meeting(self, links: Mapping[str, Link], port: int) -> str:
        chosen = list(links.values())
        others = self._other_machine(chosen)
        if len(chosen) + len(others) == 1:
            return inside(LOOPBACK)
        asked = [*chosen, *others]
        found = await find_meeting(asked, [node_checks.endpoint(link) for link in asked], port)
        if isinstance(found, Apart):
            if len(chosen) == 1:
                return inside(LOOPBACK)
            raise Unsatisfiable(found.text, hint=found.hint)
        return inside(found.address)

    def _other_machine(self, chosen: Sequence[Link]) -> list[Link]:
        """If all are on one machine: a node elsewhere, so that the address is one that works when it grows."""
        machines = {_machine(link).boot_id for link in chosen}
        if len(machines) > 1:
            return []
        open_links = (node.link for node in self._cluster.inventory)
        elsewhere = (link for link in open_links if link and link.machine and link.machine.boot_id not in machines)
        return [link for link, _ in zip(elsewhere, range(1), strict=False)]


def _machine(link: Link) -> Machine:
    assert link.machine is not None  # the link is open
    return link.machine


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
