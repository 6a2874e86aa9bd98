"""What an agent says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """All but the first two have a default: an agent of another version may know less, and must still be read."""

    pid: int
    version: str
    generation: int = 0
    started_at: str = ""
    home: str = ""
    cluster_file: str | None = None  # None: this machine alone is the cluster
    cluster_name: str = ""
    nodes: int = 0
    nodes_connected: int = 0
    running_commands: int = 0
    config_error: str | None = None  # a broken edit; the last good configuration stays in force
    config_hint: str | None = None


@dataclass(frozen=True, slots=True)
class DashboardLink:
    url: str  # lets one browser in, once
    expires_s: float
    warning: str | None = None
