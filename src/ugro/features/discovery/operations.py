"""What can be asked about cluster files, and about machines that need not be nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.features.discovery.model import Discovered
from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import ClusterFacts, ClusterFileWish
from ugro.kernel.links.model import NodeReport
from ugro.kernel.operations.request import Lines, Request


@dataclass(frozen=True, slots=True)
class ReadClusterFile(Request[ClusterFacts], route="GET /v1/cluster/file", role=Role.ADMIN, needs_files=True):
    """Reads a cluster file, which need not be in use."""

    path: str


@dataclass(frozen=True, slots=True)
class WriteClusterFile(
    Request[None],
    route="PUT /v1/cluster/file",
    role=Role.ADMIN,
    audit="write cluster file {path}",
    needs_files=True,
):
    """Writes a cluster file, or adds hosts to it. An agent that serves this file applies it at once."""

    path: str
    wish: ClusterFileWish


@dataclass(frozen=True, slots=True)
class ListSshHosts(
    Request[tuple[str, ...]], route="GET /v1/ssh-hosts", role=Role.ADMIN, needs_files=True, without_store=True
):
    """Lists the hosts in the user's ssh configuration."""

    ssh_config: str | None = None


@dataclass(frozen=True, slots=True)
class ListDiscoveredMachines(Request[Discovered], route="GET /v1/discovery", role=Role.OPERATOR):
    """Looks at all sources of the cluster file, which may take some seconds."""


@dataclass(frozen=True, slots=True)
class ReportDiscoveredMachines(Request[Lines[NodeReport]], route="GET /v1/discovery/reports", role=Role.OPERATOR):
    """Probes machines that are no nodes yet. One whose host key is not known is not logged in to."""

    node: tuple[str, ...] = ()
