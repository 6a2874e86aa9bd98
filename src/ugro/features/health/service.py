"""`ugro doctor`: examines every node and the connections between them, and reports findings as they come.

``rules`` judge what is found; here it is only collected, and every check has a time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence, Set
from dataclasses import dataclass

from ugro.features.environments.rules.versions import Installed, judge_machines, judge_versions
from ugro.features.health.rules import judge_folders, judge_node, unreachable
from ugro.features.ray.config import RaySection
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.model import Finding
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links import host_keys
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import judge_pairs
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Facts, NodeSpec, Role
from ugro.kernel.links.node import Node
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.links.rules import Examination, SshSettings, Unknown, judge_names
from ugro.kernel.support.aio import together
from ugro.kernel.support.errors import TimedOut, UgroError, Unreachable
from ugro.node import system
from ugro.node.check import ports as ports_there
from ugro.node.messages import Survival

# A pair needs only one address that works; no need to wait for others.
_SETTLE_S = 0.0


@dataclass(frozen=True, slots=True)
class _Visit:
    link: Link
    found: Examination


class Doctor:
    """One round of checks."""

    def __init__(self, cluster: Cluster, health: HealthCheck) -> None:
        self._config = cluster.config
        self._inventory = cluster.inventory
        self._ssh_options = cluster.inventory.dialling(cluster.config).options
        self._health = health
        self._visiting = asyncio.Semaphore(self._config.health_check.max_workers)
        self._findings: asyncio.Queue[Finding | None] = asyncio.Queue()

    async def findings(self, nodes: Sequence[Node]) -> AsyncIterator[Finding]:
        """A node's findings come together, as soon as it is examined; those about the cluster come last."""
        work = asyncio.create_task(self._examine_all(nodes), name="doctor")
        work.add_done_callback(lambda _: self._findings.put_nowait(None))
        try:
            while (finding := await self._findings.get()) is not None:
                yield finding
            await work
        finally:
            work.cancel()

    async def _examine_all(self, nodes: Sequence[Node]) -> None:
        self._dial_logins({node.spec.name for node in nodes})
        everyone = [visit for visit in await together(self._visit(node) for node in nodes) if visit is not None]
        seconds = self._health.second_names()
        self._report(judge_names([visit.found.name for visit in everyone], seconds))
        visits = [visit for visit in everyone if visit.found.name not in seconds]
        judge = judge_machines if self._config.environment.names_packages else judge_versions
        self._report(judge([_installed(visit) for visit in visits]))
        self._report(judge_folders([visit.found for visit in visits]))
        self._report(await _judge_connections([visit.link for visit in visits]))

    def _dial_logins(self, nodes: Set[str]) -> None:
        """Somebody who was denied may have an account by now, and would be tried within an hour only."""
        for login in self._inventory.logins:
            if node_of(login.spec.name) in nodes:
                login.wake()

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._findings.put_nowait(finding)

    async def _visit(self, node: Node) -> _Visit | None:
        try:
            # One second longer than connecting may take, to learn why it failed.
            link = await node.ready(2 * self._config.ssh.connect_timeout + 1)
            async with self._visiting:
                found = await self._examine(node, link)
        except (Unreachable, TimedOut) as error:
            self._report([unreachable(node.spec.name, error.message, error.hint)])
            return None
        self._report(judge_node(found))
        return _Visit(link, found)

    async def _examine(self, node: Node, link: Link) -> Examination:
        config = self._config
        port_keys = {
            config.cluster.master_port: "cluster.master_port",
            config.section(RaySection).redis_port: "ray.redis_port",
            config.section(RaySection).dashboard_port: "ray.dashboard_port",
        }
        limit_s = config.ssh.timeout
        facts, ssh, root, ports, packages, survival = await asyncio.gather(
            self._probe(node),
            self._ssh_settings(node.spec),
            node_checks.check(link, system.root, limit_s),
            node_checks.check(link, ports_there, limit_s, ports=list(port_keys)),
            node_checks.packages(link, timeout_s=limit_s),
            self._survival(link),
        )
        machine = link.machine
        assert machine is not None  # the link is open
        strange = self._health.notes.strange_runs(node.spec.name)
        return Examination(
            node.spec, machine, link.quality, facts, ssh, root, ports, port_keys, survival, packages,
            str(strange) if strange else None, owner=self._health.notes.owner(node.spec.name),
        )  # fmt: skip

    async def _probe(self, node: Node) -> Facts | Unknown:
        [[report]] = [reports async for reports in self._health.reports([node])]
        return report.facts or Unknown(report.error or "no answer", report.hint)

    async def _ssh_settings(self, spec: NodeSpec) -> SshSettings | Unknown | None:
        if spec.transport != "ssh":
            return None
        try:
            settings = await host_keys.ssh_settings(spec, self._ssh_options)
        except UgroError as error:
            return Unknown(error.message, error.hint)
        return SshSettings(
            strict_host_key_checking=settings.get("stricthostkeychecking", ""),
            user_known_hosts_file=settings.get("userknownhostsfile", ""),
        )

    async def _survival(self, link: Link) -> Survival | Unknown | None:
        if link.spec.transport == "local":  # part of the agent: there is no session that could end
            return None
        return await node_checks.check(link, system.survival, self._config.ssh.timeout)


def _installed(visit: _Visit) -> Installed:
    facts = visit.found.facts
    return node_checks.installed(visit.link, visit.found.packages, facts if isinstance(facts, Facts) else None)


async def _judge_connections(links: Sequence[Link]) -> list[Finding]:
    # The master first: of many nodes, all connect to the first one only.
    links = sorted(links, key=lambda link: link.spec.role is not Role.MASTER)
    endpoints = [node_checks.endpoint(link) for link in links]
    async with node_checks.mesh(links, endpoints) as nodes:
        outcomes = await nodes.connect(_SETTLE_S)
    own = {one.node: one for one in nodes.endpoints}
    found = {
        node: Unknown(str(outcome), outcome.hint) if isinstance(outcome, UgroError) else outcome
        for node, outcome in outcomes.items()
    }
    return judge_pairs([own.get(one.node, one) for one in endpoints], found)
