"""Which hosts of ``ugro init`` are one machine, and whether one of them is this machine."""

from __future__ import annotations

import os
from dataclasses import replace

from ugro.client.before_agent import with_second_names
from ugro.kernel.links.model import Facts, Gpu, Machine, NodeReport, Status
from ugro.kernel.support.codec import decode
from ugro.node.hardware import probe

HERE = decode(Machine, probe.machine(os.path.expanduser("~/grid_workspace")))
THERE = replace(HERE, boot_id="another")


def report(name: str, machine: Machine, *uuids: str) -> NodeReport:
    gpus = tuple(Gpu(index, uuid, "x") for index, uuid in enumerate(uuids))
    facts = Facts(0.0, 0.0, (0.0, 0.0, 0.0), None, 1, 1, gpus=gpus)
    return NodeReport(name, Status.HEALTHY, 100, machine=machine, facts=facts)


def test_an_ssh_name_that_leads_here_is_this_machine_unless_that_is_no_node() -> None:
    hosts = [report("localhost", HERE), report("gpu1", THERE, "GPU-a"), report("gpu1-lan", THERE, "GPU-a")]
    seen = with_second_names(hosts, has_local=True)
    assert [one.same_as for one in seen] == ["this machine", None, "gpu1"]
    assert with_second_names(hosts, has_local=False)[0].same_as is None


def test_a_host_that_did_not_answer_is_nobody() -> None:
    away = NodeReport("gpu9", Status.UNREACHABLE, 0, error="refused")
    assert with_second_names([away], has_local=True) == [away]
