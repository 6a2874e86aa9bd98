"""``ugro demo`` through the real command line: what a newcomer sees, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.rig.waiting import wait_until
from ugro.kernel.support.state_dir import StateDir
from ugro.lab import throttle as processes
from ugro.lab import train
from ugro.lab.enter import MARK
from ugro.lab.lab import Lab

_LIMIT_S = 330
_EPOCHS = 1  # of the GPT's
_EPOCH = re.compile(rf"epoch ( \d) of {train.EPOCHS}  (loss .*)")

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def scratch(ugro: Ugro) -> Path:
    """Where the demo makes its temporary state directory."""
    folder = ugro.home / "tmp"
    folder.mkdir()
    return folder


def demo(ugro: Ugro, scratch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = ugro("demo", "--gentle", *words, env={"TMPDIR": str(scratch)}, timeout=_LIMIT_S)
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


# --- balanced --------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch")
def test_the_same_training_is_shown_with_equal_and_with_measured_shares(ugro: Ugro) -> None:
    lab = Lab(StateDir(ugro.home))
    try:
        done = ugro("demo", "--keep", "--epochs", str(_EPOCHS), timeout=_LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "remove them: ugro lab down" in done.stderr
        expect_balanced(done)
        equal, balanced = (result(ugro, job) for job in ("1", "2"))
        expect_same_training(equal, balanced)
        gained = balanced["samples_per_s"] / equal["samples_per_s"]
        assert done.stdout.splitlines()[-1].split("\t")[-1] == f"× {gained:.2f}"
        assert f"{gained:.2f} times as many samples per second" in done.stderr

        assert [node["name"] for node in document(ugro, "health")["nodes"]] == ["lab1", "lab2", "lab3"]
        commands = re.findall(r"^\$ ugro (launch .*)$", done.stderr, re.MULTILINE)
        assert [command.split()[-4:] for command in commands] == [
            [mode, "--", "--epochs", str(_EPOCHS)] for mode in ("off", "adaptive")
        ]
        for number, command in enumerate(commands, start=1):
            spec = document(ugro, "status", str(number))["job"]["spec"]
            planned = ugro("launch", "--dry-run", "--json", *shlex.split(command)[1:])
            assert json.loads(planned.stdout)["spec"] == spec
    finally:
        assert ugro("lab", "down").returncode == 0
    assert lab.processes() == {}


def expect_balanced(done: subprocess.CompletedProcess[str]) -> None:
    lines = done.stdout.splitlines()
    steps = [line.split() for line in lines if re.match(r" *\d+ of \d+ ", line)]
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert [line[0] for line in first] == [line[0] for line in second] != []
    # Beside what the second run tells stands what the first one told.
    assert [line[:7] for line in second] == first
    assert all(len(line) == 11 for line in second)
    assert [line for line in lines if re.match(r"from step 1: lab\d 32, lab\d 32, lab\d 32; equal shares", line)]

    at = lines.index("node\tspeed\tequal\twaits\tbalanced\tstill waits")
    ranks = [line.split("\t") for line in lines[at + 1 : at + 4]]
    assert [rank[:3] for rank in ranks] == [["lab1", "1", "32"], ["lab2", "0.5", "32"], ["lab3", "0.25", "32"]]
    at = lines.index("run\tshares\tsamples/s\twaiting\tloss\tgain")
    equal, balanced = (line.split("\t") for line in lines[at + 1 :])
    assert (equal[0], equal[1], balanced[0]) == ("equal shares", "32 / 32 / 32", "balanced")
    assert f"every sample was seen once per epoch, {_EPOCHS} times in all" in done.stderr
    assert "Both learn the same" in done.stderr


def expect_same_training(equal: dict[str, Any], balanced: dict[str, Any]) -> None:
    for run in (equal, balanced):
        assert sorted(run["nodes"]) == ["lab1", "lab2", "lab3"]
        assert sum(run["shares"]) == 96
        assert run["seen"] == [_EPOCHS, _EPOCHS]
        assert 0 < run["measured_steps"] < run["steps"] == _EPOCHS * 16
        assert 0 <= run["waiting_ratio"] < 1
    assert equal["shares"] == [32, 32, 32]
    assert balanced["final_loss"] == pytest.approx(equal["final_loss"], abs=0.01)


def result(ugro: Ugro, job: str) -> dict[str, Any]:
    """As rank 0 told it at its end, of which the demo makes what it shows."""
    (found,) = re.findall(r"result (\{.*\})", ugro("logs", job, "--rank", "0").stdout)
    return dict(json.loads(found))


# --- the accident ----------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_rank_is_killed_and_the_training_ends_as_if_it_had_not_been(ugro: Ugro, scratch: Path) -> None:
    done = demo(ugro, scratch, "--accident")
    health, log, jobs, steps = tables(done.stdout)

    assert [line.split("\t")[0] for line in health] == ["lab1", "lab2", "lab3"]
    killed = re.search(r"rank 2 on (lab\d) is killed\.\n\n\$ kill -9 (\d+)\n", done.stderr)
    assert killed is not None, done.stderr
    assert any(re.match(rf"rank 2 {killed[1]} \| pid {killed[2]}:", line) for line in log)
    assert f"rank 2 on {killed[1]} was killed by SIGKILL" in done.stderr
    assert "from its last checkpoint" in done.stderr
    assert [line for line in log if ", on from epoch " in line]
    # Every epoch is there, in order; one that was cut short may be there twice, with the same figures.
    assert list(dict(_EPOCH.findall("\n".join(log))).items()) == _EPOCH.findall(undisturbed())
    assert [line.split("\t")[1:3] for line in jobs] == [["train", "succeeded"]]
    assert [line.split("\t")[1:3] for line in steps] == [["lab1", "1"], ["lab2", "0.5"], ["lab3", "0.25"]]
    assert "the nodes are removed" in done.stderr
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
    done = subprocess.run(argv, env={**ours, **alone}, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    return done.stdout


@pytest.mark.proof
def test_without_pytorch_a_training_in_plain_python_is_shown(ugro: Ugro, scratch: Path, tmp_path: Path) -> None:
    argv = [without_torch(tmp_path), "-c", "from ugro.cli.main import main; main()", "demo", "--json"]
    env = ugro.environment({"TMPDIR": str(scratch)})
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)["demo"]
    assert shown["kept"] is False
    failures = [attempt["failure"] for attempt in shown["job"]["attempts"]]
    assert [failure and failure["cause"] for failure in failures] == ["killed", None]
    assert [step["rank"] for step in shown["steps"]] == [0, 1, 2]
    computing = {step["node"]: step["compute_s"] for step in shown["steps"]}
    assert computing["lab3"] > computing["lab1"]
    expect_no_trace(ugro, scratch)


def without_torch(folder: Path) -> str:
    """A Python that has UGRO and all that is beside it, but for PyTorch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True, timeout=100)
    (packages,) = folder.glob("bare/lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("torch", "_")) or path.suffix == ".pth":
            (packages / path.name).symlink_to(path)
    return str(folder / "bare" / "bin" / "python")


def document(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# --- Ctrl-C ----------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGINT, "lab/cluster.yaml", marks=pytest.mark.proof),
        pytest.param(signal.SIGINT, "agent.err", marks=pytest.mark.proof),  # the agent's process has hardly begun
        pytest.param(signal.SIGTERM, "agent.lock", marks=pytest.mark.proof),
        pytest.param(signal.SIGHUP, "lab/lab3/grid_workspace", marks=pytest.mark.proof),
        (signal.SIGINT, "jobs/1/attempt_1/logs/rank_0.log"),  # the ranks run
    ],
)
def test_an_interrupted_demo_leaves_nothing(ugro: Ugro, scratch: Path, number: signal.Signals, moment: str) -> None:
    expect_nothing_left(ugro, scratch, ["demo", "--gentle"], number, moment)


@pytest.mark.proof
def test_nor_does_one_that_is_interrupted_while_it_recovers(ugro: Ugro, scratch: Path) -> None:
    moment = "jobs/1/.checkpoints/attempt_2.json"  # the ranks are about to run again
    expect_nothing_left(ugro, scratch, ["demo", "--gentle", "--accident"], signal.SIGINT, moment)


def expect_nothing_left(ugro: Ugro, scratch: Path, words: list[str], number: signal.Signals, moment: str) -> None:
    running = ugro.start(*words, env={"TMPDIR": str(scratch)})
    wait_until(lambda: list(scratch.glob(f"ugro-demo-*/{moment}")), _LIMIT_S, f"{moment} to be there")
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + number, errors
    assert b"Traceback" not in errors
    expect_no_trace(ugro, scratch)
