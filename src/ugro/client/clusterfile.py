"""Finds the cluster file of a command. The agent reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ugro.core.errors import ConfigError
from ugro.core.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir


@dataclass(frozen=True, slots=True)
class ClusterFile:
    path: Path | None  # None: this machine alone is the cluster
    is_asked_for: bool = False  # by an option, the environment, a lab or the current folder, not as a fallback


def find_cluster_file(explicit: Path | None, env: Mapping[str, str], cwd: Path, home: StateDir) -> ClusterFile:
    """The file that was asked for, which must exist; else that of a lab, the current folder, or the state directory."""
    if explicit is not None:
        return _existing(cwd / explicit.expanduser(), "check the path given with --cluster, or write one: ugro init")
    if named := env.get(CLUSTER_VARIABLE):
        return _existing(cwd / Path(named).expanduser(), f"check the variable {CLUSTER_VARIABLE}, or unset it")
    # A broken link is found too, and reported: using another cluster would surprise the user.
    for path in (home.lab_cluster, cwd / CLUSTER_FILE):
        if os.path.lexists(path):
            return ClusterFile(path, is_asked_for=True)
    fallback = home.path / CLUSTER_FILE
    return ClusterFile(fallback if os.path.lexists(fallback) else None)


def _existing(path: Path, hint: str) -> ClusterFile:
    try:
        is_there = path.exists()
    except ValueError:  # a path with a NUL in it
        is_there = False
    if not is_there:
        raise ConfigError(f"{path}: no such cluster file", hint=hint)
    return ClusterFile(path, is_asked_for=True)
