"""Which role this process has on its node. Its settings are JSON in ``UGRO_RAY``."""

from __future__ import annotations

import glob
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

from ugro.workloads.on_node.processes import is_free, say
from ugro.workloads.ray_node.driver import Driver
from ugro.workloads.ray_node.machine import available_memory, base_folder, remove, shared_memory
from ugro.workloads.ray_node.rank import Rank
from ugro.workloads.ray_node.rules import RefusedError, Settings

_REACH_S = 3.5
LASTING = 64  # exit code of what would go wrong again: UGRO does not try it again


def main() -> int:
    settings: Settings = json.loads(os.environ["UGRO_RAY"])
    if settings.get("cpus", 0) is None:
        settings = {**settings, "cpus": len(os.sched_getaffinity(0))}
    token = os.environ.pop("UGRO_RAY_TOKEN", "")
    role = ROLES[settings["role"]]
    try:
        return role(settings, token)
    except RefusedError as error:
        say(str(error))
        return LASTING


def look(settings: Settings) -> dict[str, Any]:
    """What is to be known of a node before anything starts on it."""
    try:
        ray: str | None = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray = None
    return {
        "python": platform.python_version(),
        "ray": ray,
        "has_dashboard": util.find_spec("aiohttp_cors") is not None,
        "shared_bytes": shared_memory(),
        "available_bytes": available_memory(),
        "taken_ports": [port for port in settings.get("ports", ()) if not is_free(port)],
        "unreached": _unreached(settings.get("reach")),
    }


def _unreached(target: Sequence[Any] | None) -> str | None:
    """Why this address and port cannot be reached."""
    if target is None:
        return None
    try:
        socket.create_connection((str(target[0]), int(target[1])), _REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def clean(settings: Settings) -> dict[str, Any]:
    """Removes what killed ranks of a cluster have left. Its jobs have ended."""
    for path in glob.glob(os.path.join(base_folder(), f"{settings['id']}-*")):
        remove(path)
    if settings.get("state"):
        remove(str(settings["state"]))
    return {}


def _answer(work: Callable[[Settings], dict[str, Any]]) -> Callable[[Settings, str], int]:
    def role(settings: Settings, token: str) -> int:
        os.write(1, (json.dumps(work(settings)) + "\n").encode())
        return 0

    return role


ROLES: Mapping[str, Callable[[Settings, str], int]] = {
    "head": lambda settings, token: Rank(settings, token).run(),
    "worker": lambda settings, token: Rank(settings, token).run(),
    "driver": lambda settings, token: Driver(settings, token).run(),
    "look": _answer(look),
    "clean": _answer(clean),
}
