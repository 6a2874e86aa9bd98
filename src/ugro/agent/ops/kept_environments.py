"""`ugro env`: asks nodes for the Python environments that they keep, and removes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ugro.agent.support.aio import together
from ugro.agent.support.keyed_tasks import KeyedTasks
from ugro.agent.tracking.cluster import Cluster
from ugro.core.env_report import SHORT, EnvListing, EnvRemoval, KeptEnvironment, Unasked
from ugro.core.errors import UgroError, Unreachable
from ugro.core.python_env import EnvOnNode, EnvRemoved, EnvsRemoved
from ugro.nodes.node import Node
from ugro.nodes.python_envs import PythonEnvs
from ugro.nodes.runs import Identity
from ugro.policy.python_env.kept import by_environment, meant

log = logging.getLogger(__name__)

_SEEN_S = 30.0  # how long a page may show the same answer
_PAGE_S = 1.0
_PROBLEMS = {
    "in-use": "a running job uses it",
    "busy": "it is being made",
    "not-found": "it was removed meanwhile",
}


class KeptEnvironments:
    def __init__(self, cluster: Cluster, identity: Callable[[], Identity]) -> None:
        self._cluster = cluster
        self._identity = identity
        self._tidying = KeyedTasks(lambda: None)
        self._seen: WeakKeyDictionary[Node, tuple[float, tuple[KeptEnvironment, ...]]] = WeakKeyDictionary()

    async def listing(self, nodes: Sequence[Node]) -> EnvListing:
        asked = await together(self._listed(node) for node in nodes)
        found = {node.spec.name: one for node, one in zip(nodes, asked, strict=True) if isinstance(one, tuple)}
        return EnvListing(by_environment(found), tuple(one for one in asked if isinstance(one, Unasked)))

    async def find(self, word: str) -> KeptEnvironment:
        return meant(word, (await self.listing(list(self._cluster.inventory))).environments)

    async def names(self) -> set[str]:
        """On the nodes that can be asked now, in whatever account."""
        listing = await self.listing(self._cluster.inventory.linked)
        return {one.name for one in listing.environments}

    async def seen(self, node: Node) -> tuple[KeptEnvironment, ...] | None:
        """For a page: asked some seconds ago, or now. None if the node does not answer at once."""
        asked_at, known = self._seen.get(node, (float("-inf"), None))
        if node.link is None or time.monotonic() - asked_at < _SEEN_S:
            return known
        try:
            async with asyncio.timeout(_PAGE_S):
                listing = await self.listing([node])
        except TimeoutError:
            return known
        if not listing.unasked:
            known = listing.environments
            self._seen[node] = (time.monotonic(), known)
        return known

    async def remove(self, word: str, nodes: Sequence[Node]) -> list[EnvRemoval]:
        """From those of the nodes that have it; nodes that cannot be asked are in the answer too."""
        listing = await self.listing(nodes)
        found = meant(word, listing.environments)
        holders = {one.node for one in found.nodes}
        having = [node for node in nodes if node.spec.name in holders]
        removed = await together(self._each(node, lambda envs: _remove(envs, found.name)) for node in having)
        return [*removed, *(_unasked(one) for one in listing.unasked)]

    async def gc(
        self, nodes: Sequence[Node], unused_s: float | None = None, *, everything: bool = False
    ) -> list[EnvRemoval]:
        """``everything``: also what was used just now; a node itself leaves that to a job that may be starting."""
        limit = self._cluster.config.environments.max_size

        async def tidy(envs: PythonEnvs) -> EnvRemoval:
            names = [one.name for one in await envs.list() if not one.in_use] if everything else []
            removed = await envs.remove(names) if names else EnvsRemoved(())
            gone = [one.name for one in removed.removed if one.problem is None]
            tidied = await envs.gc(limit, unused_s)
            freed = removed.freed_bytes + tidied.freed_bytes
            is_deleting = removed.is_deleting or tidied.is_deleting
            return EnvRemoval(envs.name, (*gone, *tidied.removed), freed, tidied.kept_bytes, is_deleting)

        return await together(self._each(node, tidy) for node in nodes)

    def tidy_soon(self, name: str) -> None:
        """A node has one more environment: keeps them within the limit, without anybody waiting for it."""
        self._tidying.do(("tidy environments on", name), lambda: self._tidy(name))

    async def _tidy(self, name: str) -> None:
        if (node := self._cluster.inventory.find(name)) is None:
            return
        [done] = await self.gc([node])
        if done.removed:
            names = ", ".join(one[:SHORT] for one in done.removed)
            log.info("removed unused environments: %s", names, extra={"node": name})
        if done.error:
            log.warning("environments may take more than environments.max_size: %s", done.error, extra={"node": name})

    async def close(self) -> None:
        await self._tidying.close()

    async def _listed(self, node: Node) -> tuple[EnvOnNode, ...] | Unasked:
        try:
            return await self._envs(node).list()
        except UgroError as error:
            return Unasked(node.spec.name, error.message, error.hint, isinstance(error, Unreachable))

    async def _each(
        self, node: Node, work: Callable[[PythonEnvs], Coroutine[Any, Any, EnvRemoval]]
    ) -> EnvRemoval:
        try:
            return await work(self._envs(node))
        except UgroError as error:
            return _unasked(Unasked(node.spec.name, error.message, error.hint, isinstance(error, Unreachable)))

    def _envs(self, node: Node) -> PythonEnvs:
        node.wake()  # somebody waits for the answer
        # A node that is connecting for the first time gets the time a connection may take.
        return PythonEnvs(node, self._identity(), 2 * self._cluster.config.ssh.connect_timeout)


async def _remove(envs: PythonEnvs, name: str) -> EnvRemoval:
    found = await envs.remove([name])
    [removed] = found.removed
    if removed.problem is not None:
        return EnvRemoval(envs.name, error=_why(removed))
    return EnvRemoval(envs.name, (name,), found.freed_bytes, is_deleting=found.is_deleting)


def _why(removed: EnvRemoved) -> str:
    return f"not removed: {_PROBLEMS.get(removed.problem or '', 'the node refuses')}"


def _unasked(one: Unasked) -> EnvRemoval:
    return EnvRemoval(one.node, error=one.error, hint=one.hint, is_unreachable=one.is_unreachable)
