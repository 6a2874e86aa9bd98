"""The groups of calls of ``ugro.Client``, one property each; a group is loaded when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ugro.client.agent_calls import Backups, Stores
    from ugro.client.client import Client
    from ugro.client.jobs import Jobs
    from ugro.client.reach import Reach
    from ugro.features.planning.client import Planning
    from ugro.features.recipes.client import Recipes
    from ugro.features.services.client import ServiceCalls
    from ugro.features.sweeps.client import Sweeps


class Parts:
    reach: Reach
    _ask: Callable[..., Any]
    _stream: Callable[..., Any]

    @property
    def jobs(self) -> Jobs:
        from ugro.client.jobs import Jobs

        return Jobs(cast("Client", self))

    @property
    def planning(self) -> Planning:
        from ugro.features.planning.client import Planning

        return Planning(self._stream)

    @property
    def sweeps(self) -> Sweeps:
        from ugro.features.sweeps.client import Sweeps

        return Sweeps(self._ask, self._stream)

    @property
    def services(self) -> ServiceCalls:
        from ugro.features.services.client import ServiceCalls

        return ServiceCalls(self._ask, self._stream)

    @property
    def recipes(self) -> Recipes:
        from ugro.features.recipes.client import Recipes

        return Recipes(self._ask)

    @property
    def backups(self) -> Backups:
        from ugro.client.agent_calls import Backups

        own = self.reach.own("a backup of the agent's state")
        return Backups(own.home, own.on_wait)

    @property
    def stores(self) -> Stores:
        from ugro.client.agent_calls import Stores

        own = self.reach.own("finding or moving the agent's state")
        return Stores(own.home, own.on_wait)
