"""A rank that is killed while its process exits: its script has ended, or has not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rig.nodeprogram import LocalNode
from tests.rig.ranks import ROOT
from tests.rig.waiting import wait_until

SCRIPT = """
import atexit, multiprocessing.util, os, sys, threading, time
from pathlib import Path
from ugro.train import reporting as ended

def linger():
    Path(sys.argv[2]).touch()
    time.sleep(600)

atexit.register(linger)  # runs after what is registered later
ended.note_at_exit()
left_open = open(sys.argv[3], "w")
left_open.write("a result")

def main():
    match sys.argv[1]:
        case "raises": raise ValueError("no result")
        case "exits": raise SystemExit(1)
        case "exits well": sys.exit()
        case "exits badly": sys.exit(3)
        case "exits with no number": sys.exit(0.0)
        case "ends a thread":
            threading.Thread(target=sys.exit).start()
            raise SystemExit(3)
        case "fails after all":
            try: sys.exit(0)
            except SystemExit: raise ValueError("no result") from None
        case "computes": linger()
        case "forks":
            if os.fork() == 0:
                return
            linger()
        case "has a child":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()

main()
"""


def killed(node: LocalNode, folder: Path, how: str, *, is_elastic: bool = False) -> dict[str, Any]:
    """The state of a run with one rank that was killed when it did nothing any more."""
    script, there, result = folder / "train.py", folder / "there", folder / "result"
    script.write_text(SCRIPT)
    rank = {
        "rank": 0,
        "argv": [sys.executable, str(script), how, str(there), str(result)],
        "env": {"PYTHONPATH": str(ROOT / "src")},
    }
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [rank], "elastic": is_elastic, "grace_s": 1})
    wait_until(there.exists, 30, "the rank to come to its end")
    [run] = node.runs()
    os.kill(run["state"]["ranks"][0]["pid"], signal.SIGKILL)

    def is_told() -> bool:
        [run] = node.runs()
        return run["exit"] is not None or bool(run["state"].get("lost"))

    wait_until(is_told, 30, "the end of the rank to be told")
    [run] = node.runs()
    if run["exit"] is None:
        node.call(link, "stop", job="train", attempt=1, grace_s=1)
    return dict(run)


@pytest.mark.parametrize(("how", "is_elastic"), [("ends", False), ("ends", True), ("exits well", False)])
def test_a_rank_whose_script_has_ended_has_succeeded(
    node: LocalNode, tmp_path: Path, how: str, is_elastic: bool
) -> None:
    run = killed(node, tmp_path, how, is_elastic=is_elastic)
    assert run["exit"]["outcome"] == "succeeded"
    assert (tmp_path / "result").read_text() == "a result", "also what was left in a buffer is written"
    log = node.run_dir("train", 1) / "logs" / "rank_0.log"
    assert "rank 0 was ended by signal 9 while it exited: its script had ended" in log.read_text()


@pytest.mark.parametrize(
    "how",
    [
        *("raises", "exits", "exits badly", "exits with no number", "ends a thread", "fails after all"),
        *("computes", "forks", "has a child"),
    ],
)
def test_a_rank_whose_script_has_failed_or_may_still_write_something_has_failed(
    node: LocalNode, tmp_path: Path, how: str
) -> None:
    run = killed(node, tmp_path, how)
    assert run["exit"]["outcome"] == "failed"
    assert run["exit"]["failure"]["signal"] == signal.SIGKILL


def test_a_rank_of_an_elastic_training_whose_script_has_not_ended_is_lost(node: LocalNode, tmp_path: Path) -> None:
    assert killed(node, tmp_path, "computes", is_elastic=True)["state"]["lost"][0]["signal"] == signal.SIGKILL


def test_an_exit_code_says_how_a_script_has_ended(node: LocalNode, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{SCRIPT.replace('atexit.register(linger)', '')}\natexit.register(os._exit, 3)\n")
    env = {"PYTHONPATH": str(ROOT / "src")}
    rank = {"rank": 0, "argv": [sys.executable, str(script), "ends", "", str(tmp_path / "result")], "env": env}
    node.call(node.link(), "start", job="train", attempt=1, spec={"ranks": [rank], "grace_s": 1})
    wait_until(lambda: node.runs()[0]["exit"] is not None, 30)
    assert node.runs()[0]["exit"]["failure"]["code"] == 3
