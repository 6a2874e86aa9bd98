"""`ugro doctor`: looks at every node and between them, all at once, and tells what it found as it comes.

What it means is decided in ``policy``; here is only the looking, and every look has an end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ugro.agent.ops import host_keys
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.core.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.finding import Finding
from ugro.core.node import Facts, NodeSpec
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.policy.nodes.agreement import judge_versions
from ugro.policy.nodes.crossing import (
    MOST_NODES_FOR_ALL_PAIRS,
    Connection,
    Trial,
    addresses_to_try,
    judge_trial,
    judge_trials,
    pairs_to_try,
)
from ugro.policy.nodes.diagnosis import judge_node, unreachable
from ugro.policy.nodes.examination import Examination, Network, Packages, Root, SshSettings, Survival, Untold
from ugro.policy.nodes.shared_folders import judge_folders
from ugro.remote import wire

_LISTEN_S = 5.0
_CONNECT_S = 4.0  # ends before the listener does
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Visit:
    link: Link
    found: Examination


_Visits = Mapping[str, asyncio.Task[_Visit | None]]  # None: the node could not be reached


class Doctor:
    """Made anew for each round."""

    def __init__(self, cluster: Cluster, health: HealthCheck) -> None:
        self._config = cluster.config
        self._ssh_options = cluster.inventory.dialling(cluster.config).options
        self._health = health
        # Apart, so that nodes which cannot reach each other do not hold up those that are still to be looked at.
        self._visiting = asyncio.Semaphore(self._config.health_check.max_workers)
        self._crossing = asyncio.Semaphore(self._config.health_check.max_workers)
        self._findings: asyncio.Queue[Finding | None] = asyncio.Queue()

    async def findings(self, nodes: Sequence[Node]) -> AsyncIterator[Finding]:
        """Those of one node come together, as soon as it is looked at; those of the cluster when they are known."""
        work = asyncio.create_task(self._look(nodes), name="doctor")
        work.add_done_callback(lambda _: self._findings.put_nowait(None))
        try:
            while (finding := await self._findings.get()) is not None:
                yield finding
            await work
        finally:
            work.cancel()

    async def _look(self, nodes: Sequence[Node]) -> None:
        async with asyncio.TaskGroup() as group:
            visits = {
                node.spec.name: group.create_task(self._visit(node), name=f"examine {node.spec.name}") for node in nodes
            }
            group.create_task(self._compare(visits), name="compare versions")
            group.create_task(self._cross([node.spec for node in nodes], visits), name="connect nodes to each other")

    def _tell(self, findings: Iterable[Finding | None]) -> None:
        for finding in findings:
            if finding is not None:
                self._findings.put_nowait(finding)

    # --- one node ----------------------------------------------------------------------------------------------

    async def _visit(self, node: Node) -> _Visit | None:
        try:
            # A second longer than a connection may take, to hear why it did not open.
            link = await node.ready(2 * self._config.ssh.connect_timeout + 1)
            async with self._visiting:
                found = await self._examine(node, link)
        except (Unreachable, TimedOut) as error:
            self._tell([unreachable(node.spec.name, error.message, error.hint)])
            return None
        self._tell(judge_node(found))
        return _Visit(link, found)

    async def _examine(self, node: Node, link: Link) -> Examination:
        config = self._config
        port_keys = {
            config.cluster.master_port: "cluster.master_port",
            config.ray.redis_port: "ray.redis_port",
            config.ray.dashboard_port: "ray.dashboard_port",
        }
        facts, ssh, root, network, packages, survival = await asyncio.gather(
            self._probe(node),
            self._ssh_settings(node.spec),
            self._check(link, Root, "root"),
            self._check(link, Network, "network", ports=list(port_keys)),
            self._check(link, Packages, "packages"),
            self._survival(link),
        )
        machine = link.machine
        assert machine is not None  # the link is open
        return Examination(
            node.spec, machine, link.quality, facts, ssh, root, network, port_keys, survival, packages
        )

    async def _probe(self, node: Node) -> Facts | Untold:
        [[report]] = [reports async for reports in self._health.reports([node])]
        return report.facts or Untold(report.error or "no answer", report.hint)

    async def _ssh_settings(self, spec: NodeSpec) -> SshSettings | Untold | None:
        if spec.transport != "ssh":
            return None
        try:
            settings = await host_keys.ssh_settings(spec, self._ssh_options)
        except UgroError as error:
            return Untold(error.message, error.hint)
        return SshSettings(
            host_name=settings.get("hostname", ""),
            strict_host_key_checking=settings.get("stricthostkeychecking", ""),
            user_known_hosts_file=settings.get("userknownhostsfile", ""),
        )

    async def _survival(self, link: Link) -> Survival | Untold | None:
        # On this machine a node program is a part of the agent, and no connection that closes.
        return None if link.spec.transport == "local" else await self._check(link, Survival, "survival")

    async def _check(self, link: Link, kind: type[T], what: str, **params: Any) -> T | Untold:
        limit_s = self._config.ssh.timeout
        params = {"what": what, "timeout_s": 0.9 * limit_s, **params}
        try:
            return decode(kind, await link.call("check", params, timeout_s=limit_s))
        except (TimedOut, RemoteFailure) as error:
            return Untold(error.message, error.hint)
        except DecodeError as error:
            return Untold(f"its answer makes no sense: {error}")

    # --- between nodes -----------------------------------------------------------------------------------------

    async def _compare(self, visits: _Visits) -> None:
        found = [visit.found for visit in await _reached(visits)]
        self._tell(judge_versions(found))
        self._tell(judge_folders(found))

    async def _cross(self, specs: Sequence[NodeSpec], visits: _Visits) -> None:
        if len(specs) > MOST_NODES_FOR_ALL_PAIRS:
            # A ring must not lead over those who are not there; all pairs need not wait for them.
            specs = [visit.found.spec for visit in await _reached(visits)]
        async with asyncio.TaskGroup() as group:
            trials = [
                group.create_task(self._try(visits[one], visits[other]), name=f"connect {one} to {other}")
                for one, other in pairs_to_try(specs)
            ]
        self._tell([judge_trials([trial for task in trials if (trial := task.result()) is not None])])

    async def _try(
        self, connecting: asyncio.Task[_Visit | None], listening: asyncio.Task[_Visit | None]
    ) -> Trial | None:
        connector, listener = await connecting, await listening
        if connector is None or listener is None:
            return None
        async with self._crossing:
            outcome = await self._connect(connector, listener)
        trial = Trial(connector.found, listener.found, outcome)
        self._tell([judge_trial(trial)])
        return trial

    async def _connect(self, connector: _Visit, listener: _Visit) -> Connection | Untold:
        addresses = addresses_to_try(connector.found, listener.found)
        words = {"word": secrets.token_hex(8), "reply": secrets.token_hex(8)}
        limit_s = self._config.ssh.timeout
        stream: Stream | None = None
        try:
            stream = listener.link.stream("check", {"what": "listen", "timeout_s": _LISTEN_S, **words})
            async with asyncio.timeout(limit_s):
                port = await _port(stream)
            where = {"addresses": addresses, "port": port, "timeout_s": _CONNECT_S}
            answer = await connector.link.call("check", {"what": "connect", **where, **words}, timeout_s=limit_s)
            return decode(Connection, answer)
        except UgroError as error:
            return Untold(str(error), error.hint)
        except TimeoutError:
            return Untold(f"{listener.found.name} did not listen within {limit_s:g} s")
        except (DecodeError, wire.ProtocolError) as error:
            return Untold(f"an answer makes no sense: {error}")
        finally:
            if stream is not None:
                stream.cancel()


@dataclass(frozen=True, slots=True)
class _Listening:
    port: int


async def _port(stream: Stream) -> int:
    async for _, said in stream:
        return decode(_Listening, wire.parse(said)).port
    await stream.result()
    raise RemoteFailure("it stopped listening at once")


async def _reached(visits: _Visits) -> list[_Visit]:
    return [visit for task in visits.values() if (visit := await task) is not None]
