"""What keeps a node awake: anything that somebody would miss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.power.model import OwnerReport, PowerRule, Then, When
from ugro.features.power.rules import Kind, Use, busy_with
from ugro.kernel.links.model import Facts, Gpu, GpuProcess

RULE = PowerRule(suspend_after_s=60.0)
NOBODY = OwnerReport(When.ACTIVE, Then.DRAIN, 60.0)
FACTS = Facts(0.0, 9.0, (0.1, 0.1, 0.0), 0.0, 1, 1)
IDLE = Use(FACTS, 8, NOBODY)


def test_a_node_on_which_nothing_is_done_is_not_busy() -> None:
    assert busy_with(IDLE, RULE) is None


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (replace(IDLE, jobs=(7,)), "has jobs"),
        (replace(IDLE, is_uncollected=True), "may have files of jobs that are not collected yet"),
        (replace(IDLE, held="is being measured"), "is being measured"),
        (replace(IDLE, calls=("exec",)), "runs a command"),
        (replace(IDLE, calls=("net.connect",)), "has a tunnel"),
        (replace(IDLE, calls=("env.make",)), "is making a Python environment"),
        (replace(IDLE, calls=("contents.receive",)), "is receiving code"),
        (replace(IDLE, calls=("files.send",)), "is sending files"),
        (replace(IDLE, drained="new fans"), "is drained"),
        (replace(IDLE, is_needed=True), "is needed by a waiting job"),
        (replace(IDLE, is_excluded=True), "is excluded"),
        (replace(IDLE, is_this_machine=True), "is the machine of the agent"),
        (replace(IDLE, owner=None), "has not said yet whether somebody uses it"),
        (replace(IDLE, owner=replace(NOBODY, is_known=False)), "has not said yet whether somebody uses it"),
        (replace(IDLE, owner=replace(NOBODY, is_there=True, sign="ann types")), "is used by somebody (ann types)"),
        (replace(IDLE, owner=replace(NOBODY, error="no /dev")), "cannot say whether somebody uses it: no /dev"),
        (replace(IDLE, facts=None), "has not reported yet"),
        (replace(IDLE, facts=replace(FACTS, load=(2.4, 1.0, 0.0))), "works on something else (load 2.40)"),
        (
            replace(IDLE, facts=replace(FACTS, gpus=(Gpu(0, "u", "x", use_ratio=0.9),))),
            "has a busy GPU 0: 90 % in use",
        ),
        (
            replace(IDLE, facts=replace(FACTS, gpus=(Gpu(0, "u", "x", processes=(GpuProcess(1, "p"),)),))),
            "has a process on GPU 0",
        ),
    ],
)
def test_a_node_is_busy(use: Use, reason: str) -> None:
    busy = busy_with(use, RULE)
    assert busy is not None
    assert busy.words == reason


def test_a_reason_has_a_kind_by_which_it_is_told_from_others() -> None:
    uses = {
        Kind.AGENT: replace(IDLE, is_this_machine=True),
        Kind.RULE: replace(IDLE, is_excluded=True),
        Kind.WORK: replace(IDLE, jobs=(7,)),
        Kind.PEOPLE: replace(IDLE, owner=replace(NOBODY, is_there=True)),
        Kind.OTHERS: replace(IDLE, facts=replace(FACTS, load=(9.0, 9.0, 0.0))),
        Kind.UNKNOWN: replace(IDLE, facts=None),
    }
    found = {kind: busy_with(use, RULE) for kind, use in uses.items()}
    assert {kind: busy and busy.kind for kind, busy in found.items()} == {kind: kind for kind in Kind}


def test_the_agents_own_machine_may_have_another_command_that_does_not_stop_it() -> None:
    rule = replace(RULE, suspend=("docker", "stop", "{node}"))
    assert busy_with(replace(IDLE, is_this_machine=True), rule) is None
