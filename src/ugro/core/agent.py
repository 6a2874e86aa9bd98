"""What an agent says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentStatus:
    pid: int
    version: str
    generation: int
    started_at: str
    home: str
    cluster_file: str | None  # None: this machine alone is the cluster
    cluster_name: str
    nodes: int
    nodes_connected: int
    running_commands: int
    config_error: str | None = None  # a broken edit; the last good configuration stays in force
    config_hint: str | None = None
