"""What can be asked about nodes and other hosts, over links to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.kernel.access.model import Role
from ugro.kernel.links.model import Choice, HostKey, NodeReport
from ugro.kernel.operations.request import Between, Lines, Raw, Request


@dataclass(frozen=True, slots=True)
class CheckHealth(Request[Lines[NodeReport]], route="GET /v1/health", role=Role.VIEWER):
    """Probes nodes now, and reports each as soon as it answers."""

    node: tuple[str, ...] = ()  # none: all


@dataclass(frozen=True, slots=True)
class ChooseBestNode(Request[Choice], route="GET /v1/best", role=Role.VIEWER):
    """Says which node a job would get, and why."""


@dataclass(frozen=True, slots=True)
class GetHostKey(Request[HostKey], route="GET /v1/nodes/{name:path}/hostkey", role=Role.ADMIN, needs_files=True):
    """Shows the SSH host key of a node, or of another host: NAME, USER@HOST or USER@HOST:PORT."""

    name: str
    ssh_config: str | None = None


@dataclass(frozen=True, slots=True)
class TrustHostKey(
    Request[HostKey],
    route="POST /v1/nodes/{name:path}/hostkey",
    role=Role.ADMIN,
    audit="trust {name} {fingerprints}",
    needs_files=True,
):
    """Accepts exactly the host key that was shown."""

    name: str
    fingerprints: tuple[str, ...]
    replace: bool = False
    ssh_config: str | None = None


@dataclass(frozen=True, slots=True)
class ExamineHosts(Request[Lines[NodeReport]], route="POST /v1/examine", role=Role.ADMIN, needs_files=True):
    """Probes hosts, which need not be part of the cluster: NAME, USER@HOST or USER@HOST:PORT."""

    hosts: tuple[str, ...]
    ssh_config: str | None = None


@dataclass(frozen=True, slots=True)
class OpenTunnel(
    Request[Raw],
    route="POST /v1/tunnel",
    # To a socket of their own jobs; or to a port of a node, which a job of theirs there could reach too.
    role=Role.USER,
    media="application/octet-stream",
    in_query=True,
):
    """Connects to a port of a node, or to a socket of a job there. The body is what is sent, as long as that takes."""

    node: str
    port: Annotated[int | None, Between(1, 65535)] = None
    job: Annotated[str | None, Between(most=200)] = None
    socket: Annotated[str | None, Between(most=200)] = None
