"""``client.ray_clusters``: the part of the Python API for Ray clusters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ugro.client.http import account, asked_for, lines, path_of
from ugro.features.ray.model import Access, ClusterView, ClusterWish, Phase
from ugro.kernel.support.codec import decode, dumps
from ugro.kernel.support.errors import TimedOut, UgroError
from ugro.kernel.support.state_dir import StateDir

_ONLY = "-"
_LOOK_S = 0.2
_PREPARE_S = 300.0
Say = Callable[[str], None]


def _nobody(text: str) -> None:
    pass


class RayClusterCalls:
    """Created by ``Client``. Without a name, a call means the only cluster that has not ended."""

    def __init__(self, ask: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._ask = ask
        self._stream = stream

    def start(
        self,
        wish: ClusterWish | None = None,
        *,
        environment: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        on_progress: Say = _nobody,
    ) -> ClusterView:
        """Returns when it is recorded; ``wait`` waits for its workers.

        ``environment``: the options of a job's Python environment, as in ``{"package": ["ray[default]"]}``.
        """
        body: dict[str, Any] = {
            "wish": _plain(wish or ClusterWish()),
            "user": account(),
            "fields": dict(environment or {}),
            "here": str(Path.cwd()),
            "env": None,
        }
        return self._start(body, env, on_progress)

    def _start(self, body: dict[str, Any], env: Mapping[str, str] | None, on_progress: Say) -> ClusterView:
        for document in lines(self._stream("POST", "/v1/ray-clusters", body, timeout_s=None)):
            if "needs" in document:
                return self._start({**body, "env": asked_for(document["needs"], env)}, env, on_progress)
            if "cluster" in document:
                return decode(ClusterView, document["cluster"])
            on_progress(str(document["progress"]))
        raise UgroError("the agent has ended before the cluster was recorded", hint="look: ugro cluster status")

    def wait(
        self, name: str | None = None, *, timeout_s: float | None = None, on_progress: Say = _nobody
    ) -> ClusterView:
        """Returns when all workers have joined, one has ended for good, or the cluster is over. Raises TimedOut."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.get(name)
            if found.is_complete or found.lost or found.phase in (Phase.STOPPED, Phase.FAILED):
                return found
            if deadline is not None and time.monotonic() > deadline:
                raise TimedOut(f"the Ray cluster {found.name} is not complete: {found.reason}")
            on_progress(found.reason or str(found.phase))
            time.sleep(_LOOK_S)

    def wait_stopped(self, name: str, *, on_progress: Say = _nobody) -> ClusterView:
        while (found := self.get(name)).phase not in (Phase.STOPPED, Phase.FAILED):
            on_progress(f"{found.phase}: {found.head.state}")
            time.sleep(_LOOK_S)
        return found

    def list(self, *, everything: bool = False) -> list[ClusterView]:
        answer = self._ask("GET", "/v1/ray-clusters" + ("?all=true" if everything else ""))
        return [decode(ClusterView, one) for one in answer["clusters"]]

    def get(self, name: str | None = None) -> ClusterView:
        return decode(ClusterView, self._ask("GET", _path(name))["cluster"])

    def access(self, name: str | None = None) -> Access:
        return decode(Access, self._ask("GET", f"{_path(name)}/access")["access"])

    def scale(self, workers: int, name: str | None = None) -> ClusterView:
        answer = self._ask("POST", f"{_path(name)}/scale", {"workers": workers}, timeout_s=_PREPARE_S)
        return decode(ClusterView, answer["cluster"])

    def stop(self, name: str | None = None) -> ClusterView:
        """Returns at once; ``wait_stopped`` waits until nothing of it runs."""
        return decode(ClusterView, self._ask("DELETE", _path(name))["cluster"])


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


def _path(name: str | None) -> str:
    return path_of("ray-clusters", _ONLY if name is None else name)


def _plain(wish: ClusterWish) -> Any:
    import json  # with the wish's own names

    return json.loads(dumps(wish))
