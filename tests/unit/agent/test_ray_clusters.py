"""Who may use a Ray cluster that runs in the account of its user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ugro.agent.ray_cluster.service import RayClusters
from ugro.agent.ray_cluster.starting import Starting
from ugro.core.errors import NotAllowed
from ugro.core.node import NodeSpec
from ugro.core.ray_cluster import ClusterWish, Head, RayCluster, Worker

ANNS = RayCluster(
    1,
    "k",
    "ann",
    ClusterWish("ray"),
    Head("gpu1", "python3", "10.0.0.1", 6379, 8265, "/state"),
    "token",
    (Worker(1, "gpu2", 1, "python3"),),
)


def clusters(*personal: str) -> RayClusters:
    """``personal``: the nodes on which people have accounts of their own."""
    nodes = [SimpleNamespace(spec=NodeSpec(name)) for name in ("gpu1", "gpu2", "gpu3")]
    cluster: Any = SimpleNamespace(inventory=nodes)
    nothing: Any = SimpleNamespace(ray_clusters=None, jobs=None)

    def login_of(node: Any, user: str) -> str:
        name = str(node.spec.name)
        return f"{user}@{name}" if name in personal else name

    return RayClusters(nothing, nothing, cluster, nothing, Starting(cluster, nothing, nothing, dict, login_of))


@pytest.mark.parametrize("personal", ["gpu1", "gpu2"])
def test_only_its_user_runs_code_on_a_cluster_in_their_account(personal: str) -> None:
    clusters(personal).expect_open_to(ANNS, "ann")
    with pytest.raises(NotAllowed, match="the Ray cluster ray runs in the account of ann"):
        clusters(personal).expect_open_to(ANNS, "bob")


def test_a_cluster_that_is_in_nobodys_own_account_is_for_everybody() -> None:
    clusters("gpu3").expect_open_to(ANNS, "bob")
