"""Which nodes a cluster file names, for what is decided before an agent runs."""

from __future__ import annotations

from pathlib import Path

from ugro.config.load import load_config


def runs_jobs_here(cluster: Path | None) -> bool:
    """Whether an agent starts jobs on its own machine: as a node of its own, or by a command that reaches one."""
    return any(node.transport != "ssh" for node in load_config(cluster, {}).nodes)
