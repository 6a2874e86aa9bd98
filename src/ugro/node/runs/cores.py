"""Leaves most cores to the machine's owner: binds the processes of a run to a few of theirs, and lets them go again.

Not their priority: a process that was made nicer cannot be made less so again without rights.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, List

from ugro.node import durable
from ugro.node.process import process_tree
from ugro.node.runs.rundir import RunDir

_FILE = "cores.json"


def bind(run: RunDir, part: float) -> Dict[str, Any]:
    """To that part of the cores that each process had, at least one; 1: to all that it had."""
    pids = process_tree.marked(run.mark)
    before = _before(run)
    if part < 1:
        before = {**{str(pid): _cores(pid) for pid in pids}, **before}
        # Written first: to let them go, one must know what they had.
        durable.write_json(run.file(_FILE), {"run": run.name, "cores": before}, is_lasting=False)
    everything = sorted({core for cores in before.values() for core in cores})
    for pid in pids:
        cores = before.get(str(pid), everything)
        if cores:
            _bind(pid, cores if part >= 1 else few(cores, part))
    if part >= 1:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(run.file(_FILE))
    return {"processes": len(pids)}


def few(cores: List[int], part: float) -> List[int]:
    """The last ones, so that all runs share the same."""
    return cores[-max(1, int(len(cores) * part)) :]


def _before(run: RunDir) -> Dict[str, List[int]]:
    found = durable.read_json(run.file(_FILE)) or {}
    cores = found.get("cores")
    return cores if found.get("run") == run.name and isinstance(cores, dict) else {}


def _bind(pid: int, cores: List[int]) -> None:
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in os.listdir("/proc/%d/task" % pid):
            with contextlib.suppress(OSError):  # the same, or cores that were taken offline
                os.sched_setaffinity(int(thread), cores)


def _cores(pid: int) -> List[int]:
    try:
        return sorted(os.sched_getaffinity(pid))
    except OSError:
        return []
