"""The git commit and branch of submitted code; None without git."""

from __future__ import annotations

import os
from pathlib import Path

from ugro.core.environment import Origin

_TIMEOUT_S = 3.0


def origin_of(folder: Path) -> Origin | None:
    here = folder.absolute()
    if not any(os.path.lexists(place / ".git") for place in (here, *here.parents)):
        return None
    import subprocess  # loaded only when needed: it takes long to load

    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(here), "status", "--porcelain=v2", "--branch"]
    # Takes no lock that another git would have to wait for.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parsed(done.stdout.decode("utf-8", "replace"))


def parsed(status: str) -> Origin:
    lines = status.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and " " in line[2:])
    commit, branch = head.get("branch.oid"), head.get("branch.head")
    return Origin(
        commit=None if commit in (None, "(initial)") else commit,
        is_dirty=any(not line.startswith("#") for line in lines),
        branch=None if branch in (None, "(detached)") else branch,
    )
