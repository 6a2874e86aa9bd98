"""The second process of a supervisor: leases end and nothing is left, whichever of the two is stopped or killed.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode, agent_folder
from tests.rig.waiting import is_alive, signal_all, wait_until
from ugro.kernel.support.errors import RemoteFailure
from ugro.node.machine import node_key
from ugro.node.runs.rundir import AgentDir

ONE = f"{AGENT}/train.1"
# Whatever a process can do to get away: a session of its own, no environment, no parent, deaf to SIGTERM.
HIDDEN = "setsid-empty-double"


def record_of(node: LocalNode, job: str = "train") -> dict[str, Any]:
    path = node.run_dir(job, 1) / "exit.json"
    wait_until(path.exists, 10, "its exit record")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def start(node: LocalNode, spec: dict[str, Any], job: str = "train") -> None:
    node.call(node.link(), "start", job=job, attempt=1, spec=spec)


def start_hidden(node: LocalNode, ledger: Ledger, **more: Any) -> None:
    """A run with a child that is found by nothing but being below its supervisor."""
    start(node, {"ranks": [ledger.rank(0, "hostile", "plain", HIDDEN)], "grace_s": 0.2, **more})
    wait_until(lambda: ledger.lines("ready"))
    wait_until(lambda: len(ledger.entries()) == 3)


def kill_reaper(node: LocalNode) -> int:
    """Returns when the supervisor has another."""
    old = node.reaper("train", 1)
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: node.reaper("train", 1) != old, what="another reaper")
    return node.reaper("train", 1)


# --- leases -----------------------------------------------------------------------------------------------------


def test_a_stopped_supervisor_keeps_no_lease_alive_and_a_run_without_one_goes_on(
    node: LocalNode, ledger: Ledger
) -> None:
    start(node, {"ranks": [ledger.rank(5, "sleep")]}, job="other")
    start(node, ledger.sleeping(lease_s=2))
    signal_all(signal.SIGSTOP, [node.supervisor("train", 1), node.supervisor("other", 1)])
    wait_until(lambda: len(ledger.starts()) == 3)
    wait_until(lambda: not ledger.alive_of(ONE), 10, "the ranks of the run with a lease to end")
    record = record_of(node)
    assert record["outcome"] == "lease-expired"
    assert [rank["signal"] for rank in record["ranks"]] == [signal.SIGTERM] * 2, "they had their grace"
    assert [entry.is_alive for entry in ledger.starts(f"{AGENT}/other.1")] == [True]


def test_supervisor_and_reaper_are_not_stopped_by_one_signal_to_a_group(node: LocalNode, ledger: Ledger) -> None:
    start(node, ledger.sleeping(1))
    supervisor, reaper = node.supervisor("train", 1), node.reaper("train", 1)
    assert os.getsid(supervisor) != os.getsid(reaper)
    assert os.getpgid(supervisor) != os.getpgid(reaper)


def test_a_lease_that_cannot_be_read_ends_no_run_before_its_time(node: LocalNode, ledger: Ledger) -> None:
    """Its file server gave an error, or no descriptor was left."""
    start(node, ledger.sleeping(1, lease_s=2.5))
    wait_until(lambda: len(ledger.starts()) == 1)
    lease = agent_folder(node.root.resolve(), node.spec.name) / "lease"
    lease.unlink(missing_ok=True)
    lease.mkdir()
    record = record_of(node)
    assert record["outcome"] == "lease-expired"
    assert record["duration_s"] > 2


@pytest.mark.proof
def test_a_supervisor_that_hangs_has_its_tree_killed_at_the_end_of_the_lease(node: LocalNode, ledger: Ledger) -> None:
    """The file server is gone along with the agent: a process that opens the lease waits for ever."""
    start_hidden(node, ledger, lease_s=4)
    lease = agent_folder(node.root.resolve(), node.spec.name) / "lease"
    lease.unlink(missing_ok=True)
    os.mkfifo(lease)
    wait_until(lambda: Path(f"/proc/{node.supervisor('train', 1)}/wchan").read_text() == "wait_for_partner")
    ledger.expect_nothing_alive(15)
    os.kill(node.supervisor("train", 1), signal.SIGKILL)  # with what its reaper told it, unread
    wait_until((node.run_dir("train", 1) / "ended").exists, what="the reaper's word that nothing is left")


@pytest.mark.proof
def test_a_run_that_ends_slowly_has_no_more_time_than_its_lease(node: LocalNode, ledger: Ledger) -> None:
    start(node, {"ranks": [ledger.rank(0, "hostile", "plain")], "grace_s": 0.5, "lease_s": 4})
    wait_until(lambda: ledger.lines("ready"))
    order = {"run": "train.1", "reason": "enough", "grace_s": 600, "signal": None}
    spec = json.loads((node.run_dir("train", 1) / "spec.json").read_text())
    folder = agent_folder(node.root.resolve(), node.spec.name) / "supervisors" / spec["supervisor"]
    with (folder / "control").open("w") as control:
        control.write(json.dumps(order) + "\n")
    ledger.expect_nothing_alive(15)
    assert record_of(node)["outcome"] == "stopped"


@pytest.mark.proof
def test_the_successor_of_a_killed_reaper_keeps_the_lease(node: LocalNode, ledger: Ledger) -> None:
    start(node, ledger.sleeping(lease_s=5))
    wait_until(lambda: len(ledger.starts()) == 2)
    kill_reaper(node)
    kill_reaper(node)  # and its successor has one
    os.kill(node.supervisor("train", 1), signal.SIGSTOP)
    wait_until(lambda: not ledger.alive_of(ONE), 15, "the ranks to end")
    assert record_of(node)["outcome"] == "lease-expired"


# --- what a killed supervisor leaves ----------------------------------------------------------------------------


def test_what_a_killed_supervisor_left_has_ended_when_its_run_is_said_to_be_over(
    node: LocalNode, ledger: Ledger
) -> None:
    start_hidden(node, ledger)
    link = node.link()
    reaper = node.reaper("train", 1)
    os.kill(reaper, signal.SIGSTOP)  # slow; the clean-up continues it, and waits for it
    os.kill(node.supervisor("train", 1), signal.SIGKILL)
    record = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]
    assert [entry.kind for entry in ledger.entries() if entry.is_alive] == []
    assert (record["outcome"], record["reason"]) == ("lost", "its supervisor was killed")
    assert record["may_have_left"] is False
    wait_until(lambda: not is_alive(reaper), what="the reaper to end")


@pytest.mark.proof
def test_a_control_group_proves_that_nothing_is_left_when_both_were_killed(node: LocalNode, ledger: Ledger) -> None:
    start_hidden(node, ledger, cpus=1)
    if not json.loads((node.run_dir("train", 1) / "state.json").read_text())["groups"]:
        pytest.skip("no control groups can be made here")
    node.kill_supervisor("train", 1)
    record = node.call(node.link(), "stop", job="train", attempt=1)["run"]["exit"]
    ledger.expect_nothing_alive(0.1)
    assert (record["reason"], record["may_have_left"]) == ("its supervisor was killed", False)


@pytest.mark.proof
def test_after_reaper_and_supervisor_all_that_was_seen_ends_and_the_run_does_not_claim_more(
    node: LocalNode, ledger: Ledger
) -> None:
    start_hidden(node, ledger)
    link = node.link()
    successor = kill_reaper(node)
    os.kill(node.supervisor("train", 1), signal.SIGKILL)
    record = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]
    ledger.expect_nothing_alive(1)
    assert (record["outcome"], record["may_have_left"]) == ("lost", True)
    assert not is_alive(successor)


@pytest.mark.proof
def test_a_supervisor_with_another_reaper_ends_its_run_as_ever(node: LocalNode, ledger: Ledger) -> None:
    start_hidden(node, ledger)
    link = node.link()
    successor = kill_reaper(node)
    record = node.call(link, "stop", job="train", attempt=1, grace_s=0.2)["run"]["exit"]
    assert (record["outcome"], record["unkillable"], record["leftovers"]) == ("stopped", [], 2)
    ledger.expect_nothing_alive(0.1)
    wait_until(lambda: not is_alive(successor), what="the second reaper to end")


def test_a_run_that_another_supervisor_takes_up_has_not_ended_with_the_first(node: LocalNode, ledger: Ledger) -> None:
    """The first was killed before its claim: what its reaper noted is not about the second."""
    spec = ledger.sleeping(1)
    with pytest.raises(RemoteFailure):
        node.call(node.link(crash="supervisor.moved"), "start", job="train", attempt=1, spec=spec)
    wait_until((node.run_dir("train", 1) / "ended").exists, what="the reaper's word that nothing is left")
    start(node, spec)
    run = AgentDir(str(node.root), AGENT, node_key(node.spec.name)).run("train", 1)
    assert not run.has_all_ended()
