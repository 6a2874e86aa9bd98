"""Runs that may still have processes, of all agents: what they use on this node must stay.

Their folders are looked at, not only locks: a supervisor may have been killed, or live on another machine that shares
the folder.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterator

from ugro.remote.clock import boot_id
from ugro.remote.identity import machine_id
from ugro.remote.state.rundir import AgentDir, RunDir


def those_that_may_live(root: str) -> Iterator[RunDir]:
    return (run for run in _runs(root) if _may_live(run))


def _runs(root: str) -> Iterator[RunDir]:
    agents = os.path.join(root, ".ugro", "agents")
    for folder in os.listdir(agents) if os.path.isdir(agents) else ():
        name, at, node_key = folder.partition("@")
        with contextlib.suppress(OSError, ValueError):
            if at:
                yield from AgentDir(root, name, node_key).runs()


def _may_live(run: RunDir) -> bool:
    if run.exit() is not None:
        return False
    if run.is_alive():
        return True
    claimed_in = run.claimed_in()
    if claimed_in is None:  # it has started nothing; if it ever does, it looks for what it needs first
        return False
    is_here = run.agent.path.endswith("@" + machine_id())
    if is_here and claimed_in not in ("", boot_id()):
        return False
    return not run.has_all_ended()
