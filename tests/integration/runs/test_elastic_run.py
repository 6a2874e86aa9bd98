"""A run whose ranks are lost one by one: it goes on, and each can be started again, once for each order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.waiting import wait_until
from ugro.kernel.links.link import Link

ONE = f"{AGENT}/train.1"


def started(node: LocalNode, ledger: Ledger, *ranks: dict[str, Any], **more: Any) -> Link:
    link = node.link()
    ledger.may_start_again = True
    node.call(link, "start", job="train", attempt=1, spec={"ranks": list(ranks), "elastic": True, "grace_s": 1, **more})
    return link


def state(node: LocalNode) -> dict[str, Any]:
    [run] = node.runs()
    return {**(run["state"] or {}), "status": run["status"], "exit": run["exit"]}


def lost(node: LocalNode) -> list[tuple[int, int | None, int]]:
    return [(one["rank"], one["signal"], one["starts"]) for one in state(node).get("lost", [])]


def pid_of(node: LocalNode, rank: int) -> int:
    return next(int(one["pid"]) for one in state(node)["ranks"] if one["rank"] == rank)


def stop(node: LocalNode, link: Link) -> dict[str, Any]:
    found: dict[str, Any] = node.call(link, "stop", job="train", attempt=1, grace_s=1)["run"]["exit"]
    return found


def test_a_lost_rank_is_told_and_started_again_once_for_each_order(node: LocalNode, ledger: Ledger) -> None:
    link = started(node, ledger, ledger.rank(0, "sleep"), ledger.rank(1, "sleep"))
    wait_until(lambda: len(ledger.starts(ONE)) == 2)
    first = pid_of(node, 1)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: lost(node) == [(1, signal.SIGKILL, 1)], what="the loss to be told")
    assert state(node)["status"] == "running"
    for _ in range(3):  # an order that comes again is the same
        node.call(link, "start_again", job="train", attempt=1, rank=1, starts=1)
    wait_until(lambda: len(ledger.starts(ONE)) == 3)
    wait_until(lambda: lost(node) == [] and pid_of(node, 1) != first)
    node.call(link, "start_again", job="train", attempt=1, rank=0, starts=1)  # one that runs
    os.kill(pid_of(node, 1), signal.SIGKILL)
    wait_until(lambda: lost(node) == [(1, signal.SIGKILL, 2)])
    assert len(ledger.starts(ONE)) == 3
    record = stop(node, link)
    assert record["outcome"] == "stopped"
    assert [(one["rank"], one.get("was_lost", False)) for one in record["ranks"]] == [(0, False), (1, True)]
    ledger.expect_nothing_alive()


@pytest.mark.proof
def test_a_run_without_a_rank_lives_until_it_is_stopped_and_its_store_with_it(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    there = tmp_path / "store"
    store = {"rank": 0, "argv": ["sh", "-c", f"echo $$ > {there}; exec sleep 600"], "env": {}}
    link = started(node, ledger, ledger.rank(0, "exit_with", 3), store=store)
    wait_until(lambda: lost(node) == [(0, None, 1)])
    wait_until(there.exists)
    assert state(node)["status"] == "running"
    record = stop(node, link)
    assert record["outcome"] == "stopped"
    assert record["leftovers"] == 0
    ledger.expect_nothing_alive()


@pytest.mark.proof
def test_a_run_has_succeeded_when_its_ranks_have_also_one_that_was_lost_before(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    link = started(node, ledger, ledger.rank(0, "wait_for", go, 0))
    wait_until(lambda: len(ledger.starts(ONE)) == 1)
    os.kill(pid_of(node, 0), signal.SIGKILL)
    wait_until(lambda: lost(node) == [(0, signal.SIGKILL, 1)])
    node.call(link, "start_again", job="train", attempt=1, rank=0, starts=1)
    wait_until(lambda: len(ledger.starts(ONE)) == 2)
    go.touch()
    wait_until(lambda: state(node)["exit"] is not None)
    assert state(node)["exit"]["outcome"] == "succeeded"


@pytest.mark.proof
def test_what_a_lost_rank_left_ends_before_it_is_started_again(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    child = tmp_path / "child"
    rank = ledger.rank(1, "sleep")
    rank["argv"] = ["sh", "-c", f'sleep 600 & echo $! > {child}; exec "$@"', "sh", *rank["argv"]]
    link = started(node, ledger, ledger.rank(0, "sleep"), rank)
    wait_until(lambda: len(ledger.starts(ONE)) == 2)
    left = int(child.read_text())
    os.kill(pid_of(node, 1), signal.SIGKILL)
    wait_until(lambda: lost(node) == [(1, signal.SIGKILL, 1)])

    def again() -> bool:
        node.call(link, "start_again", job="train", attempt=1, rank=1, starts=1)
        return len(ledger.starts(ONE)) == 3

    wait_until(again)
    assert not os.path.exists(f"/proc/{left}") or "State:\tZ" in Path(f"/proc/{left}/status").read_text()
    stop(node, link)
    ledger.expect_nothing_alive()


@pytest.mark.proof
def test_who_trains_on_is_told_while_it_runs_and_recorded_at_its_end(node: LocalNode, ledger: Ledger) -> None:
    link = started(node, ledger, ledger.rank(0, "sleep"))
    folder = node.run_dir("train", 1)
    (folder / "members.json").write_text("[no members")
    (folder / ".new").write_text('{"number": 3, "ranks": [0, 2]}')
    (folder / ".new").rename(folder / "members.json")
    wait_until(lambda: state(node).get("members") == {"number": 3, "ranks": [0, 2]})
    assert stop(node, link)["members"] == {"number": 3, "ranks": [0, 2]}
