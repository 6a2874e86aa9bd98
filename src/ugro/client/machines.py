"""Which of some hosts are one machine: for ``ugro init``, which has no agent to decide that yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ugro.core.node import Machine, NodeReport, NodeSpec
from ugro.core.support.codec import decode
from ugro.policy.nodes.machines import Sighting, second_names
from ugro.remote.hardware import probe

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
