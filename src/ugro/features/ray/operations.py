"""What can be asked about Ray clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ugro.features.ray.model import Access, ClusterView, ClusterWish
from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Kind, Lines, Needs, Request

ONLY = "-"  # in the place of a name: the only one that has not ended


@dataclass(frozen=True, slots=True)
class StartProgress:
    progress: str


@dataclass(frozen=True, slots=True)
class OneCluster:
    cluster: ClusterView


@dataclass(frozen=True, slots=True)
class StartRayCluster(
    Request[Lines[StartProgress | OneCluster | Needs]],
    route="POST /v1/ray-clusters",
    role=Role.USER,
    audit="start Ray cluster {wish}",
):
    """Starts a Ray cluster: says how far it is, then what is recorded, before its workers have joined."""

    wish: ClusterWish
    user: str  # who the agent sees, whatever is claimed here
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its Python environment
    here: str = "/"
    env: Mapping[str, str] | None = None  # None: the client has not been asked for variables yet


@dataclass(frozen=True, slots=True)
class ClusterList:
    clusters: tuple[ClusterView, ...]


@dataclass(frozen=True, slots=True)
class ListRayClusters(Request[ClusterList], route="GET /v1/ray-clusters", role=Role.VIEWER):
    """Lists Ray clusters, with ``all`` those that have ended, too."""

    all: bool = False


@dataclass(frozen=True, slots=True)
class GetRayCluster(Request[OneCluster], route="GET /v1/ray-clusters/{name}", role=Role.VIEWER, of=Kind.RAY_CLUSTER):
    """Shows a Ray cluster with its head and workers."""

    name: str = ONLY


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    access: Access


@dataclass(frozen=True, slots=True)
class GetRayClusterAccess(
    Request[ClusterAccess],
    route="GET /v1/ray-clusters/{name}/access",
    role=Role.USER,
    of=Kind.RAY_CLUSTER,
    is_own=True,  # its token runs anything there
):
    """Says how a program connects to a Ray cluster, with the token."""

    name: str = ONLY


@dataclass(frozen=True, slots=True)
class ScaleRayCluster(
    Request[OneCluster],
    route="POST /v1/ray-clusters/{name}/scale",
    role=Role.USER,
    audit="scale Ray cluster {name} {workers}",
    of=Kind.RAY_CLUSTER,
    is_own=True,
):
    """Changes the number of workers; those that have ended are replaced."""

    workers: int
    name: str = ONLY


@dataclass(frozen=True, slots=True)
class StopRayCluster(
    Request[OneCluster],
    route="DELETE /v1/ray-clusters/{name}",
    role=Role.USER,
    audit="stop Ray cluster {name}",
    of=Kind.RAY_CLUSTER,
    is_own=True,
):
    """Stops a Ray cluster and everything that it has started; answers at once."""

    name: str = ONLY
