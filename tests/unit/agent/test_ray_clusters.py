"""Who may use a Ray cluster that runs in the account of its user."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ugro.features.ray.model import ClusterWish, Head, RayCluster, Worker
from ugro.features.ray.service import RayClusters
from ugro.features.ray.starting import Starting
from ugro.kernel.jobs.model import Placement, Share
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import NotAllowed

ANNS = RayCluster(
    1,
    "k",
    "ann",
    ClusterWish("ray"),
    Head("gpu1", "python3", "10.0.0.1", 6379, 8265, "/state"),
    "token",
    (Worker(1, "gpu2", 1, "python3"),),
)


class PlacedJobs:
    """Each job of the cluster, where it was placed."""

    def __init__(self, *nodes: str) -> None:
        self._placements = [Placement((Share(node),)) for node in nodes]

    async def submitted(self, key: str) -> Any:
        return SimpleNamespace(placement=self._placements.pop()) if self._placements else None


def clusters(*personal: str, placed: PlacedJobs | None = None) -> RayClusters:
    """``personal``: the nodes on which people have accounts of their own."""
    nodes = [SimpleNamespace(spec=NodeSpec(name)) for name in ("gpu1", "gpu2", "gpu3")]
    cluster: Any = SimpleNamespace(inventory=nodes)
    nothing: Any = SimpleNamespace(ray_clusters=None, jobs=placed or PlacedJobs())

    def login_of(node: Any, user: str) -> str:
        name = str(node.spec.name)
        return f"{user}@{name}" if name in personal else name

    starting = Starting(cluster, nothing, nothing, dict, login_of)
    return RayClusters(nothing, nothing, cluster, nothing, starting, nothing)


def expect_open_to(made: RayClusters, user: str) -> None:
    asyncio.run(made.expect_open_to(ANNS, user))


@pytest.mark.parametrize("personal", ["gpu1", "gpu2"])
def test_only_its_user_runs_code_on_a_cluster_in_their_account(personal: str) -> None:
    expect_open_to(clusters(personal), "ann")
    with pytest.raises(NotAllowed, match="the Ray cluster ray runs in the account of ann"):
        expect_open_to(clusters(personal), "bob")


def test_a_cluster_stays_its_users_when_the_configuration_has_no_accounts_any_more() -> None:
    expect_open_to(clusters(placed=PlacedJobs("gpu1", "ann@gpu2")), "ann")
    with pytest.raises(NotAllowed, match="the Ray cluster ray runs in the account of ann"):
        expect_open_to(clusters(placed=PlacedJobs("gpu1", "ann@gpu2")), "bob")


def test_a_cluster_that_is_in_nobodys_own_account_is_for_everybody() -> None:
    expect_open_to(clusters("gpu3", placed=PlacedJobs("gpu1", "gpu2")), "bob")
