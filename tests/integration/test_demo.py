"""``ugro demo`` through the real command line: what a newcomer sees, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.rig.waiting import wait_until
from ugro.core.statedir import StateDir
from ugro.lab import processes, train
from ugro.lab.enter import MARK
from ugro.lab.lab import Lab

_LIMIT_S = 110
_EPOCH = re.compile(rf"epoch ( \d) of {train.EPOCHS}  (loss .*)")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def scratch(ugro: Ugro) -> Path:
    """Where the demo makes its temporary state directory."""
    folder = ugro.home / "tmp"
    folder.mkdir()
    return folder


def demo(ugro: Ugro, scratch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = ugro("demo", *words, env={"TMPDIR": str(scratch)}, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def expect_no_trace(ugro: Ugro, scratch: Path) -> None:
    # The processes first: one that lived on would write its files again.
    wait_until(lambda: not ugro.processes(), 10, "every process of the demo to end")
    inside = os.fsencode(f"{MARK}={scratch}/")
    assert [pid for pid in processes.pids() if inside in processes.read(pid, "environ")] == []
    assert list(scratch.iterdir()) == []
    assert list((ugro.home / "user").iterdir()) == []
    assert sorted(path.name for path in ugro.home.iterdir()) == ["cwd", "tmp", "user"]
    assert list((ugro.home / "cwd").iterdir()) == []


# --- what it shows ---------------------------------------------------------------------------------------------


def test_a_rank_is_killed_and_the_training_ends_as_if_it_had_not_been(ugro: Ugro, scratch: Path) -> None:
    done = demo(ugro, scratch)
    health, log, jobs, steps = tables(done.stdout)

    assert [line.split("\t")[0] for line in health] == ["lab1", "lab2", "lab3"]
    killed = re.search(r"rank 2, on (lab\d), is killed\.\n\n\$ kill -9 (\d+)\n", done.stderr)
    assert killed is not None, done.stderr
    assert any(re.match(rf"rank 2 {killed[1]} \| pid {killed[2]}:", line) for line in log)
    assert f"rank 2 on {killed[1]} was killed by SIGKILL" in done.stderr
    assert "from its last checkpoint" in done.stderr
    assert [line for line in log if ", on from epoch " in line]
    # Every epoch is there, in order; one that was cut short may be there twice, with the same figures.
    assert list(dict(_EPOCH.findall("\n".join(log))).items()) == _EPOCH.findall(undisturbed())
    assert [line.split("\t")[1:3] for line in jobs] == [["train", "succeeded"]]
    assert [line.split("\t")[1:3] for line in steps] == [["lab1", "1"], ["lab2", "0.5"], ["lab3", "0.25"]]
    assert "the nodes are gone again" in done.stderr
    expect_no_trace(ugro, scratch)


def tables(text: str) -> Iterator[list[str]]:
    """What is written between the headers of its tables: health, the log, the job, the steps."""
    lines = text.splitlines()
    first_log = next(number for number, line in enumerate(lines) if re.match(r"rank \d ", line))
    begins = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in ("job\t", "rank\t")]
    yield lines[1:first_log]
    yield lines[first_log : begins[0]]
    yield lines[begins[0] + 1 : begins[1]]
    yield lines[begins[1] + 1 :]


def undisturbed() -> str:
    """One process without UGRO: the same samples in the same order."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ours = {key: value for key, value in os.environ.items() if not key.startswith("UGRO_")}
    argv = [sys.executable, train.__file__]
    done = subprocess.run(argv, env={**ours, **alone}, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_demo_is_one_json_document(ugro: Ugro, scratch: Path) -> None:
    shown = json.loads(demo(ugro, scratch, "--json").stdout)["demo"]
    assert shown["kept"] is False
    assert shown["job"]["state"] == "succeeded"
    failures = [attempt["failure"] for attempt in shown["job"]["attempts"]]
    assert [failure and failure["cause"] for failure in failures] == ["killed", None]
    assert [step["rank"] for step in shown["steps"]] == [0, 1, 2]
    computing = {step["node"]: step["compute_s"] for step in shown["steps"]}
    assert computing["lab3"] > computing["lab1"]


def test_a_kept_demo_is_a_lab_of_the_user_and_its_command_does_what_it_did(ugro: Ugro) -> None:
    lab = Lab(StateDir(ugro.home))
    try:
        done = ugro("demo", "--keep", timeout=_LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert "until: ugro lab down" in done.stderr
        shown = re.search(r"^\$ ugro (launch .*)$", done.stderr, re.MULTILINE)
        assert shown is not None

        job = document(ugro, "status", "last")["job"]
        assert [node["name"] for node in document(ugro, "health")["nodes"]] == ["lab1", "lab2", "lab3"]
        assert document(ugro, *shlex.split(shown[1]), "--dry-run")["spec"] == job["spec"]
    finally:
        assert ugro("lab", "down").returncode == 0
    assert lab.processes() == {}


def document(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# --- Ctrl-C ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "lab/cluster.yaml"),
        (signal.SIGINT, "agent.err"),  # the agent's process has hardly begun
        (signal.SIGTERM, "agent.lock"),
        (signal.SIGINT, "lab/lab3/grid_workspace"),
        (signal.SIGHUP, "lab/lab3/grid_workspace"),
        (signal.SIGINT, "jobs/1/attempt_1/logs/rank_0.log"),  # the ranks run
        (signal.SIGINT, "jobs/1/checkpoints/attempt_2.json"),  # they are about to run again
    ],
)
def test_an_interrupted_demo_leaves_nothing(ugro: Ugro, scratch: Path, number: signal.Signals, moment: str) -> None:
    running = ugro.start("demo", env={"TMPDIR": str(scratch)})
    wait_until(lambda: list(scratch.glob(f"ugro-demo-*/{moment}")), _LIMIT_S, f"{moment} to be there")
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + number, errors
    assert b"Traceback" not in errors
    expect_no_trace(ugro, scratch)
