"""The status of an agent, as it reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """All fields but the first two have defaults: an agent of another version may send fewer."""

    pid: int
    version: str
    generation: int = 0
    started_at: str = ""
    home: str = ""
    cluster_file: str | None = None  # None: the cluster is this machine alone
    cluster_name: str = ""
    nodes: int = 0
    nodes_connected: int = 0
    running_commands: int = 0
    config_error: str | None = None  # of a broken edit; the last good configuration stays in force
    config_hint: str | None = None
    ignored_variables: tuple[str, ...] = ()  # settings that differ between the asking command and the agent


@dataclass(frozen=True, slots=True)
class DashboardLink:
    url: str  # lets one browser log in, once
    expires_s: float
    warning: str | None = None
