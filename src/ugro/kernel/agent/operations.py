"""What can be asked of the agent about itself, its cluster file, and the nodes in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import AgentStatus, DashboardLink
from ugro.kernel.operations.request import Request


@dataclass(frozen=True, slots=True)
class GetAgentStatus(
    Request[AgentStatus],
    route="GET /v1/agent",
    role=Role.VIEWER,
    without_store=True,
    in_browser=True,
    in_headers=("ugro_settings", "ugro_ssh_auth_sock"),
):
    """Says which agent this is, what it serves, and what is wrong with it."""

    ugro_settings: str | None = None  # the UGRO_* variables of the command that asks, as JSON
    ugro_ssh_auth_sock: str | None = None  # of the newest login


@dataclass(frozen=True, slots=True)
class StopAgent(
    Request[None],
    route="POST /v1/agent/stop",
    role=Role.ADMIN,
    audit="stop agent",
    without_store=True,
    in_query=True,
):
    """Stops the agent. Jobs keep running."""

    pid: int | None = None  # the agent that is meant: another may have replaced it
    only_if_idle: bool = False


@dataclass(frozen=True, slots=True)
class CreateDashboardLink(
    Request[DashboardLink],
    route="POST /v1/dashboard",
    role=Role.VIEWER,
    audit="create sign-in link",
    for_people=True,
):
    """Makes a link to the dashboard that signs a browser in once, within some minutes."""


@dataclass(frozen=True, slots=True)
class UseClusterFile(
    Request[None],
    route="PUT /v1/cluster",
    role=Role.ADMIN,
    audit="use cluster file {path}",
    needs_files=True,
    without_store=True,
):
    """Makes the agent serve another cluster file; none: this machine alone."""

    path: str | None
    found: bool = False  # in a folder, not named by the user: what it executes must be allowed


@dataclass(frozen=True, slots=True)
class ReloadClusterFile(Request[None], route="POST /v1/cluster/reload", role=Role.USER):
    """Makes the agent read the cluster file now; it would do so within a second."""


@dataclass(frozen=True, slots=True)
class AddNode(Request[None], route="POST /v1/nodes", role=Role.ADMIN, audit="add node {name} {fields}"):
    """Adds a node to the cluster file."""

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoveNode(Request[None], route="DELETE /v1/nodes/{name:path}", role=Role.ADMIN, audit="remove node {name}"):
    """Removes a node from the cluster file, unless a job runs there."""

    name: str
    only_if_idle: bool = False  # also not if a job left files there that are not here yet
    even_with_jobs: bool = False


@dataclass(frozen=True, slots=True)
class DrainNode(
    Request[None],
    route="POST /v1/nodes/{name:path}/drain",
    role=Role.OPERATOR,
    audit="drain {name} {reason}",
    in_browser=True,
):
    """Starts no new jobs on a node."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeNode(
    Request[None],
    route="POST /v1/nodes/{name:path}/resume",
    role=Role.OPERATOR,
    audit="resume {name}",
    in_browser=True,
):
    """Lets a drained node take jobs again."""

    name: str
