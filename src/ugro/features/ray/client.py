"""Starts Ray clusters and waits for them, and writes what a driver needs to connect to one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.client.http import account, asked_for
from ugro.features.ray.model import Access, ClusterView, ClusterWish, Phase
from ugro.features.ray.operations import ONLY, GetRayCluster, OneCluster, StartRayCluster
from ugro.kernel.operations.request import Needs
from ugro.kernel.support.errors import TimedOut, UgroError
from ugro.kernel.support.state_dir import StateDir

if TYPE_CHECKING:
    from ugro.client.client import Client

_LOOK_S = 0.2
PREPARE_S = 300.0  # scaling up looks at nodes
Say = Callable[[str], None]


def _nobody(text: str) -> None:
    pass


def start(
    client: Client,
    wish: ClusterWish | None = None,
    *,
    environment: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    on_progress: Say = _nobody,
) -> ClusterView:
    """Returns when it is recorded; ``wait`` waits for its workers.

    ``environment``: the options of a job's Python environment, as in ``{"package": ["ray[default]"]}``.
    """
    asked = StartRayCluster(wish or ClusterWish(), account(), dict(environment or {}), str(Path.cwd()))
    return _start(client, asked, env, on_progress)


def _start(
    client: Client, asked: StartRayCluster, env: Mapping[str, str] | None, on_progress: Say
) -> ClusterView:
    for said in client.follow(asked, timeout_s=None):
        if isinstance(said, Needs):
            return _start(client, replace(asked, env=asked_for(said.needs, env)), env, on_progress)
        if isinstance(said, OneCluster):
            return said.cluster
        on_progress(said.progress)
    raise UgroError("the agent has ended before the cluster was recorded", hint="look: ugro cluster status")


def wait(
    client: Client, name: str = ONLY, *, timeout_s: float | None = None, on_progress: Say = _nobody
) -> ClusterView:
    """Returns when all workers have joined, one has ended for good, or the cluster is over. Raises TimedOut."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = client.ask(GetRayCluster(name)).cluster
        if found.is_complete or found.lost or found.phase in (Phase.STOPPED, Phase.FAILED):
            return found
        if deadline is not None and time.monotonic() > deadline:
            raise TimedOut(f"the Ray cluster {found.name} is not complete: {found.reason}")
        on_progress(found.reason or str(found.phase))
        time.sleep(_LOOK_S)


def wait_stopped(client: Client, name: str, *, on_progress: Say = _nobody) -> ClusterView:
    while (found := client.ask(GetRayCluster(name)).cluster).phase not in (Phase.STOPPED, Phase.FAILED):
        on_progress(f"{found.phase}: {found.head.state}")
        time.sleep(_LOOK_S)
    return found


def connection(home: StateDir, access: Access) -> dict[str, str]:
    """The variables with which a driver on one of its nodes connects."""
    return {
        "RAY_ADDRESS": access.address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(home, access)),
        "RAY_NAMESPACE": access.namespace,
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }


def token_file(home: StateDir, access: Access) -> Path:
    """Only its user can read it."""
    file = token_path(home, access.name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(access.token)
    fresh.rename(file)
    return file


def token_path(home: StateDir, name: str) -> Path:
    return home.path / "ray" / f"{name}.token"
