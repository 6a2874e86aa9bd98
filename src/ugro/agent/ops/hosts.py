"""Hosts that need not be part of the cluster, as a user writes them: their keys, and what they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace

from ugro.agent.ops import host_keys
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.config.names import is_host, is_user
from ugro.core.errors import NotAllowed, Unreachable, UsageError
from ugro.core.hostkey import HostKey
from ugro.core.node import NodeReport, NodeSpec
from ugro.core.support.destination import Destination
from ugro.nodes.node import Dialling, Node


def host_spec(word: str, remote_root: str) -> NodeSpec:
    to = Destination.parse(word)
    if not is_host(to.host) or (to.user and not is_user(to.user)):
        raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
    return NodeSpec(name=word, host=to.host, user=to.user, port=to.port, remote_root=remote_root)


async def _nothing(name: str) -> NodeSpec | None:
    return None


class Hosts:
    def __init__(self, cluster: Cluster, health: HealthCheck) -> None:
        self._cluster = cluster
        self._health = health
        self.found: Callable[[str], Awaitable[NodeSpec | None]] = _nothing  # machines that were found, by their names
        self.on_trusted: Callable[[], None] = lambda: None

    async def host_key(self, word: str, ssh_config: str | None = None) -> HostKey:
        """Of a node, of a machine that was found, or of another host that ssh finds by this word."""
        try:
            return await host_keys.look_up(await self._way(word, ssh_config))
        except Unreachable as error:
            if error.cause == "name-not-found":
                self._cluster.inventory.named(word)  # if it is no node either: the nearest name is more helpful
            raise

    async def trust(
        self, word: str, fingerprints: tuple[str, ...], *, replace: bool, ssh_config: str | None = None
    ) -> HostKey:
        key = await host_keys.trust(await self._way(word, ssh_config), fingerprints, replace=replace)
        for node in (*self._cluster.inventory, *self._cluster.inventory.logins):
            if node.link is None:  # it may be this host by another name, or behind it
                node.wake()
        self.on_trusted()
        return key

    async def examine(
        self, specs: Sequence[NodeSpec], ssh_config: str | None = None
    ) -> AsyncGenerator[list[NodeReport]]:
        """Probes hosts that are not (yet) part of the cluster."""
        dialling = self._dialling(ssh_config)
        nodes = [Node(spec, dialling) for spec in specs]
        try:
            # A first connection may take longer than a probe over an open link.
            timeout_s = 2 * self._cluster.config.ssh.connect_timeout + self._cluster.config.health_check.timeout
            async with contextlib.aclosing(self._health.reports(nodes, timeout_s=timeout_s)) as batches:
                async for reports in batches:
                    yield reports
        finally:
            await asyncio.gather(*(node.close() for node in nodes))

    async def _way(self, word: str, ssh_config: str | None) -> host_keys.Way:
        node = next((one for one in self._cluster.inventory if one.spec.name == word), None)
        spec = node.spec if node is not None else await self.found(word) or self._host(word)
        if spec.transport != "ssh":
            raise NotAllowed("is not reached by ssh and has no host key", subject=word)
        dialling = self._dialling(ssh_config)
        return host_keys.Way(spec, dialling.options, dialling.environment())

    def _host(self, word: str) -> NodeSpec:
        try:
            return host_spec(word, self._cluster.config.remote_root)
        except UsageError:
            return self._cluster.inventory.named(word).spec  # raises: it is no node either

    def _dialling(self, ssh_config: str | None) -> Dialling:
        dialling = self._cluster.inventory.dialling(self._cluster.config)
        if ssh_config is None:
            return dialling
        return replace(dialling, options=replace(dialling.options, config_file=ssh_config))
