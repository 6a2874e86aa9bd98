"""``--trials-per-gpu``: trials of one sweep are on a GPU together, and nobody else is, whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.integration.sweeps import over
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

pytestmark = pytest.mark.proof
_S = 90
# Writes down when it begins and ends, and on which GPU; runs until its file is there.
SCRIPT = """
import json, os, pathlib, sys, time
name, marks = sys.argv[1].replace("--", ""), pathlib.Path(os.environ["MARKS"])
def mark(word):
    with (marks / "lines").open("a") as file:
        file.write(f"{word} {name} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
mark("begin")
with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1, "loss": 1.0}) + "\\n")
while not (marks / name).exists():
    time.sleep(0.05)
mark("end")
"""


@pytest.fixture
def ugro(tmp_path: Path) -> Iterator[Ugro]:
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    write_gpus(tmp_path / "gpus", [SimulatedGpu()])
    gpu = {"UGRO_NVML_LIBRARY": str(build_nvml_stub(tmp_path)), "UGRO_PRETEND_GPUS": str(tmp_path / "gpus")}
    with SshdFarm(tmp_path / "farm", 1) as farm, commands(farm.cluster_yaml(nodes={"n001": {"env": gpu}})) as ugro:
        (ugro.home / "code").mkdir()
        (ugro.home / "marks").mkdir()
        (ugro.home / "code" / "train.py").write_text(SCRIPT)
        yield ugro
        ugro("cancel", "--all")


def lines(ugro: Ugro) -> list[str]:
    path = ugro.home / "marks" / "lines"
    return path.read_text().splitlines() if path.exists() else []


def go(ugro: Ugro, name: str) -> None:
    (ugro.home / "marks" / name).touch()


def test_two_trials_share_a_gpu_and_a_stranger_waits_for_both(ugro: Ugro) -> None:
    own = ["--cwd", str(ugro.home / "code"), "--env", f"MARKS={ugro.home / 'marks'}"]
    words = ["sweep", "train.py", "--x", "1,2,3,4", "--metric", "loss", "--trials-per-gpu", "2", "--name", "pair"]
    started = ugro(*words, *own, "--json")
    assert started.returncode == 0, started.stderr
    wait_until(lambda: len(lines(ugro)) >= 2, _S, "two trials to begin")
    # The next is submitted when the agent knows that the second runs.
    wait_until(lambda: len(json.loads(ugro("status", "--json").stdout)["jobs"]) == 3, _S, "a third to wait")
    other = ugro("launch", "train.py", "other", "--gpus-per-node", "1", "--name", "other", *own, "-d", "--json")
    assert other.returncode == 0, other.stderr
    assert sorted(lines(ugro)) == ["begin x=1 0", "begin x=2 0"], "the same GPU"
    os.kill(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"], signal.SIGKILL)
    why = wait_until(lambda: ugro("why", "other").stdout, _S, "a reason")
    assert "GPU" in why
    go(ugro, "x=1")
    wait_until(lambda: "begin x=3 0" in lines(ugro), _S, "the third trial, which has waited longer than the stranger")
    for name in ("x=2", "x=3"):
        assert not any("other" in line for line in lines(ugro)), "a trial has the GPU still"
        go(ugro, name)
    wait_until(lambda: "begin other 0" in lines(ugro), _S, "the stranger, once the GPU is free")
    assert {"end x=1 0", "end x=2 0", "end x=3 0"} <= set(lines(ugro))
    go(ugro, "x=4")
    go(ugro, "other")
    wait_until(lambda: "end x=4 0" in lines(ugro), _S, "the last trial")
    assert lines(ugro)[-4:] == ["begin other 0", "end other 0", "begin x=4 0", "end x=4 0"], "alone"
    assert over(ugro, "pair")["state"] == "done"


def test_sharing_is_refused_where_it_cannot_be_kept(ugro: Ugro) -> None:
    own = ["--cwd", str(ugro.home / "code")]
    words = ["sweep", "train.py", "--x", "1,2", "--trials-per-gpu", "2"]
    cases = ((["--preemptible"], "cannot be preemptible"), (["--gpus-per-node", "2"], "have one on one node"))
    for more, says in cases:
        done = ugro(*words, *more, *own)
        assert (done.returncode, says in done.stderr, done.stderr.count("error:")) == (2, True, 1), done.stderr
