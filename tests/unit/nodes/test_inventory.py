"""The nodes of a configuration and the logins beside them."""

from __future__ import annotations

import asyncio
from typing import Any

from ugro.kernel.links.cluster import Inventory
from ugro.kernel.links.model import NodeSpec


class Slow:
    """A login that closes when the others have begun to."""

    def __init__(self, name: str, together: asyncio.Barrier) -> None:
        self.spec = NodeSpec(name)
        self._together = together

    async def close(self) -> None:
        await self._together.wait()


def test_logins_that_nothing_leads_to_any_more_are_closed_at_once() -> None:
    async def run() -> None:
        inventory, together = Inventory(dict), asyncio.Barrier(3)
        for name in ("ann@gpu1", "bob@gpu1", "cat@gpu2"):
            login: Any = Slow(name, together)
            inventory._logins[name] = login
        async with asyncio.timeout(10):
            await inventory._redial_logins(same_way=True)
        assert inventory.logins == ()

    asyncio.run(run())
