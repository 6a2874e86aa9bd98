"""Environments that nodes keep, in the accounts of their users, too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ugro.features.environments.service.node_envs import KeptEnvironments
from ugro.kernel.config.schema import Config
from ugro.kernel.links.cluster import Cluster, Inventory
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Identity


class Keeping:
    """A node or login whose program answers that it keeps these."""

    def __init__(self, name: str, *kept: str, is_linked: bool = True) -> None:
        self.spec = NodeSpec(name)
        self.link = self if is_linked else None
        self._kept = kept

    def wake(self) -> None: ...

    async def ready(self, timeout_s: float, *, patiently: bool) -> Any:
        return self.link

    async def call(self, method: str, params: object, *, timeout_s: float) -> dict[str, Any]:
        made = {"python": "/p", "version": "3.11.2", "size": 1, "made_at": "", "used_at": ""}
        return {"environments": [{"made": {"name": name, **made}, "in_use": 0} for name in self._kept]}


def test_what_is_only_in_somebodys_account_is_kept_too() -> None:
    inventory = Inventory(dict)
    for node in (Keeping("gpu1", "a" * 64), Keeping("gpu2", is_linked=False)):
        inventory._nodes[node.spec.name] = cast(Any, node)
    for login in (Keeping("ann@gpu1", "b" * 64), Keeping("bob@gpu1", "c" * 64, is_linked=False)):
        inventory._logins[login.spec.name] = cast(Any, login)
    cluster = cast(Cluster, SimpleNamespace(inventory=inventory, config=Config(nodes=())))
    identity = Identity("agent", 1)
    assert asyncio.run(KeptEnvironments(cluster, identity).names()) == {"a" * 64, "b" * 64}
