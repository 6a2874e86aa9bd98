"""What needs no agent: allowances of cluster files, the nodes in one, and which hosts are one machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ugro.kernel.config.allowance import Allowances, effects_of
from ugro.kernel.config.load import load_config
from ugro.kernel.links.model import Machine, NodeReport, NodeSpec
from ugro.kernel.links.rules import Sighting, second_names
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import Unallowed
from ugro.kernel.support.state_dir import StateDir
from ugro.node.hardware import probe

# --- allowances -------------------------------------------------------------------------------------------------------
# Allows cluster files that are found in folders, without an agent: none is started before its file is allowed.


def require(home: StateDir, path: Path) -> tuple[str, ...]:
    """What the file does, which is allowed. Raises Unallowed."""
    effects = effects_of(path)
    Allowances(home).require(effects)
    return effects.lines


def allow(home: StateDir, shown: Unallowed) -> None:
    """Exactly what the error shows, whatever the file has become since."""
    Allowances(home).add(shown.file, shown.digest, shown.lines)


def deny(home: StateDir, path: Path) -> bool:
    """False if nothing was allowed."""
    return Allowances(home).remove(str(path.resolve()))


# --- cluster nodes ----------------------------------------------------------------------------------------------------
# Which nodes a cluster file names, for what is decided before an agent runs.


def runs_jobs_here(cluster: Path | None) -> bool:
    """Whether an agent starts jobs on its own machine: as a node of its own, or by a command that reaches one."""
    return any(node.transport != "ssh" for node in load_config(cluster, {}).nodes)


# --- machines ---------------------------------------------------------------------------------------------------------


HERE = "this machine"


def with_second_names(reports: Sequence[NodeReport], *, has_local: bool) -> list[NodeReport]:
    """The same reports; each further name for a machine says which host is that machine.

    ``has_local``: this machine comes first, as ``this machine``.
    """
    here = [Sighting(HERE, _this_machine())] if has_local else []
    hosts = [
        Sighting(report.name, report.machine, frozenset(gpu.uuid for gpu in report.facts.gpus if gpu.uuid))
        for report in reports
        if report.machine is not None and report.facts is not None
    ]
    seconds = second_names([*here, *hosts])
    return [replace(report, same_as=seconds.get(report.name)) for report in reports]


def _this_machine() -> Machine:
    return decode(Machine, probe.machine(os.path.expanduser(NodeSpec(HERE).remote_root)))
