"""Who uses an environment: runs hold its lock while they live, and their folders say which one they were started with.

Both are looked at. The lock lets no run start with an environment that is being removed, and none be removed that a
supervisor uses; the folders tell of a run whose supervisor was killed, or lives on another machine with this folder.
"""

from __future__ import annotations

import os
from typing import Any, Dict

from ugro.remote.program import Refused
from ugro.remote.python_env.place import Place
from ugro.remote.state import live_runs
from ugro.remote.state.rundir import RunDir

_WAIT_S = 3.0  # who looks for unused ones holds each lock for a moment


def hold(root: str, name: str) -> int:
    """For a run, before its first rank starts: the environment stays until the descriptor is closed."""
    place = Place(root)
    fd = place.lock(name, alone=False, wait_s=_WAIT_S)
    if fd is None:
        raise Refused("busy", "the Python environment %.12s is being made or removed" % name)
    if place.made(name) is None:
        os.close(fd)
        raise Refused("no-environment", "the Python environment %.12s is not on this node" % name)
    place.note_use(name)
    return fd


def counts(place: Place) -> Dict[str, int]:
    """By environment, how many runs may still need it."""
    found: Dict[str, int] = {}
    for run in live_runs.those_that_may_live(place.root):
        name = _environment(run)
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return found


def _environment(run: RunDir) -> Any:
    spec = (run.envelope() or {}).get("spec")
    return spec.get("environment") if isinstance(spec, dict) else None
