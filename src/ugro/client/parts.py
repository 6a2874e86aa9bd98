"""The groups of calls of ``ugro.Client``, one property each; a group is loaded when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ugro.client.agent_calls import Backups, Stores
    from ugro.client.jobs import Folders, Jobs
    from ugro.client.reach import Reach
    from ugro.features.discovery.client import ClusterFiles, DiscoveryCalls
    from ugro.features.experiments.client import Experiments
    from ugro.features.planning.client import Planning
    from ugro.features.power.client import PowerCalls
    from ugro.features.recipes.client import Recipes
    from ugro.features.safe_mode.client import SafeModeCalls
    from ugro.features.services.client import ServiceCalls
    from ugro.features.sweeps.client import Sweeps


class Parts:
    reach: Reach
    _ask: Callable[..., Any]
    _stream: Callable[..., Any]

    @property
    def jobs(self) -> Jobs:
        from ugro.client.jobs import Jobs

        return Jobs(self._ask, self._stream)

    @property
    def planning(self) -> Planning:
        from ugro.features.planning.client import Planning

        return Planning(self._stream)

    @property
    def sweeps(self) -> Sweeps:
        from ugro.features.sweeps.client import Sweeps

        return Sweeps(self._ask, self._stream)

    @property
    def experiments(self) -> Experiments:
        from ugro.features.experiments.client import Experiments

        return Experiments(self._ask, self._stream)

    @property
    def folders(self) -> Folders:
        from ugro.client.jobs import Folders

        return Folders(self._stream)

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

    @property
    def safe_mode(self) -> SafeModeCalls:
        from ugro.features.safe_mode.client import SafeModeCalls

        return SafeModeCalls(self._ask)

    @property
    def cluster_files(self) -> ClusterFiles:
        from ugro.features.discovery.client import ClusterFiles

        return ClusterFiles(self._ask)

    @property
    def power(self) -> PowerCalls:
        from ugro.features.power.client import PowerCalls

        return PowerCalls(self._ask)

    @property
    def discovery(self) -> DiscoveryCalls:
        from ugro.features.discovery.client import DiscoveryCalls

        return DiscoveryCalls(self._ask, self._stream)
