"""The groups of calls of ``ugro.Client``, one property each; a group is loaded when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ugro.client.backups import Backups
    from ugro.client.cluster_files import ClusterFiles
    from ugro.client.discovery import DiscoveryCalls
    from ugro.client.environments import Environments
    from ugro.client.experiments import Experiments
    from ugro.client.folders import Folders
    from ugro.client.hardware import HardwareCalls
    from ugro.client.hooks import HookCalls
    from ugro.client.jobs import Jobs
    from ugro.client.planning import Planning
    from ugro.client.power import PowerCalls
    from ugro.client.ray_clusters import RayClusterCalls
    from ugro.client.reach import Reach
    from ugro.client.recipes import Recipes
    from ugro.client.safe_mode import SafeModeCalls
    from ugro.client.services import ServiceCalls
    from ugro.client.stores import Stores
    from ugro.client.sweeps import Sweeps
    from ugro.client.usage import UsageCalls


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
        from ugro.client.planning import Planning

        return Planning(self._stream)

    @property
    def sweeps(self) -> Sweeps:
        from ugro.client.sweeps import Sweeps

        return Sweeps(self._ask, self._stream)

    @property
    def experiments(self) -> Experiments:
        from ugro.client.experiments import Experiments

        return Experiments(self._ask, self._stream)

    @property
    def folders(self) -> Folders:
        from ugro.client.folders import Folders

        return Folders(self._stream)

    @property
    def services(self) -> ServiceCalls:
        from ugro.client.services import ServiceCalls

        return ServiceCalls(self._ask, self._stream)

    @property
    def recipes(self) -> Recipes:
        from ugro.client.recipes import Recipes

        return Recipes(self._ask)

    @property
    def backups(self) -> Backups:
        from ugro.client.backups import Backups

        own = self.reach.own("a backup of the agent's state")
        return Backups(own.home, own.on_wait)

    @property
    def stores(self) -> Stores:
        from ugro.client.stores import Stores

        own = self.reach.own("finding or moving the agent's state")
        return Stores(own.home, own.on_wait)

    @property
    def safe_mode(self) -> SafeModeCalls:
        from ugro.client.safe_mode import SafeModeCalls

        return SafeModeCalls(self._ask)

    @property
    def hardware(self) -> HardwareCalls:
        from ugro.client.hardware import HardwareCalls

        return HardwareCalls(self._ask, self._stream)

    @property
    def cluster_files(self) -> ClusterFiles:
        from ugro.client.cluster_files import ClusterFiles

        return ClusterFiles(self._ask)

    @property
    def environments(self) -> Environments:
        from ugro.client.environments import Environments

        return Environments(self._ask, self._stream)

    @property
    def ray_clusters(self) -> RayClusterCalls:
        from ugro.client.ray_clusters import RayClusterCalls

        return RayClusterCalls(self._ask, self._stream)

    @property
    def power(self) -> PowerCalls:
        from ugro.client.power import PowerCalls

        return PowerCalls(self._ask)

    @property
    def hooks(self) -> HookCalls:
        from ugro.client.hooks import HookCalls

        return HookCalls(self._ask)

    @property
    def usage(self) -> UsageCalls:
        from ugro.client.usage import UsageCalls

        return UsageCalls(self._ask)

    @property
    def discovery(self) -> DiscoveryCalls:
        from ugro.client.discovery import DiscoveryCalls

        return DiscoveryCalls(self._ask, self._stream)
