"""``ugro plan`` and ``ugro launch --nodes best`` on three nodes whose speeds are made up, and once with real steps."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.pretend_trials import SCRIPT
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.timeout(400)
SPEEDS = ("n001=10", "n002=20", "n003=2000")
LIMIT_S = 60


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with ExitStack() as stack:
        farm = Farms(stack)(3)
        nodes = {node.name: {"python": sys.executable} for node in farm.nodes}
        with commands(farm.cluster_yaml(nodes=nodes)) as ugro:
            for name in ("code", "marks"):
                (ugro.home / name).mkdir()
            (ugro.home / "code" / "train.py").write_text(SCRIPT)
            yield ugro


def words_of(ugro: Ugro, *more: str) -> list[str]:
    code, marks = ugro.home / "code", ugro.home / "marks"
    return ["train.py", "--workdir", str(code), *more, "--", str(marks), *SPEEDS]


def ran(ugro: Ugro) -> list[str]:
    """What was started since, by node."""
    marks = sorted((ugro.home / "marks").iterdir())
    nodes = [mark.read_text() for mark in marks]
    for mark in marks:
        mark.unlink()
    return sorted(nodes)


def planned(ugro: Ugro, *more: str) -> dict[str, Any]:
    done = ugro("plan", *words_of(ugro, "--json", *more))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plan_measures_once_and_its_best_nodes_are_launched(ugro: Ugro) -> None:
    found = planned(ugro)
    plan = found["plan"]
    assert plan["predictions"][0]["nodes"] == ["n001", "n002"]
    assert len(plan["predictions"]) == 7
    assert sum(plan["predictions"][0]["shares"]) == plan["global_batch"] == 96
    # 64 samples of 10 ms, 20 ms in each step, 10 ms for the exchange.
    assert plan["predictions"][0]["samples_per_s"] == pytest.approx(96 / 0.67, rel=0.05)
    assert {one["node"]: one["is_cached"] for one in plan["nodes"]} == dict.fromkeys(("n001", "n002", "n003"), False)
    assert ran(ugro) == ["n001", "n001", "n002", "n002", "n003", "n003"], "each alone, and all together"

    shown = ugro("plan", *words_of(ugro, "--nodes", "3"))
    assert ran(ugro) == [], "a second plan measures nothing"
    best, *others = shown.stdout.splitlines()
    assert best.startswith("best: n001 + n002 ")
    assert "samples/s  ±" in best
    assert any("n003 costs more waiting than it gives" in line and "all three" in line for line in others)
    assert others[-1].split() == found["command"]
    assert found["command"][:3] == ["ugro", "launch", "train.py"]
    assert found["command"].count("--only") == 2

    looked = json.loads(ugro("launch", *words_of(ugro, "--dry-run", "--json", "--only", "n001")).stdout)
    assert looked["prediction"]["nodes"] == ["n001"]
    done = ugro("launch", *words_of(ugro, "--nodes", "best", "--json"))
    assert done.returncode == 0, done.stderr
    number = str(json.loads(done.stdout)["job"]["id"])
    assert ugro("wait", number).returncode == 0
    assert ran(ugro) == ["n001", "n002"]

    def compared() -> str:
        return next((line for line in ugro("results", number).stdout.splitlines() if "predicted" in line), "")

    wait_until(lambda: "measured" in compared(), LIMIT_S, "what was measured")
    assert "samples/s ±" in compared()
    forecast = json.loads(ugro("results", number, "--json").stdout)["job"]["results"]["forecast"]
    assert forecast["prediction"] == plan["predictions"][0], "what is compared is what was predicted"


def test_a_limit_of_nodes_and_a_choice_of_them_are_kept(ugro: Ugro) -> None:
    assert {tuple(one["nodes"]) for one in planned(ugro, "--only", "n002")["plan"]["predictions"]} == {("n002",)}
    some = planned(ugro, "--only", "n001", "--only", "n002")["plan"]["predictions"]
    assert some[0] == planned(ugro)["plan"]["predictions"][0]
    assert ran(ugro) == [], "a joint trial of more nodes says enough"
    done = ugro("launch", *words_of(ugro, "--nodes", "best", "--max-nodes", "1", "--dry-run", "--json"))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["placement"]["shares"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["plan", "plain.py", "--workdir", "{code}/../plain"], 6, "plain.py does not use ugro.train"),
        (["plan"], 2, "a script or a job file is needed"),
        (["plan", "train.py", "--nodes", "11"], 2, "expected a whole number from 1 to 10"),
        (["launch", "train.py", "--max-nodes", "2"], 2, "--max-nodes is for --nodes best"),
        (["launch", "train.py", "--workdir", "{code}", "--only", "n009"], 3, "there is no node n009"),
    ],
)
def test_what_cannot_be_planned_is_refused(ugro: Ugro, words: list[str], code: int, says: str) -> None:
    (ugro.home / "plain").mkdir(exist_ok=True)
    (ugro.home / "plain" / "plain.py").write_text("print('no loop of ours')\n")
    (ugro.home / "plain" / "other.py").write_text("import ugro.train\n")
    done = ugro(*(word.format(code=ugro.home / "code") for word in words))
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_nodes_that_failed_together_are_not_predicted_together_afterwards(ugro: Ugro) -> None:
    done = ugro("plan", *words_of(ugro, "--json", "--name", "apart"), "--apart")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert {len(one["nodes"]) for one in plan["predictions"]} == {1}
    assert [one["node"] for one in plan["left_out"]] == ["all together"]

    def predicted(*nodes: str) -> Any:
        only = [word for node in nodes for word in ("--only", node)]
        words = words_of(ugro, "--dry-run", "--json", "--nodes", str(len(nodes)), *only)
        return json.loads(ugro("launch", *words, "--apart").stdout)["prediction"]

    assert predicted("n001") is not None
    assert predicted("n001", "n002") is None
    ran(ugro)


@pytest.mark.proof
def test_the_trials_of_a_plan_that_is_interrupted_end(ugro: Ugro) -> None:
    under_way = ugro.start("plan", *words_of(ugro, "--fresh"), "--wait")
    try:
        wait_until(lambda: len(list((ugro.home / "marks").iterdir())) == 3, LIMIT_S, "all trials to begin")
        os.kill(under_way.pid, signal.SIGINT)
        _, said = under_way.communicate(timeout=LIMIT_S)
    finally:
        under_way.kill()
        under_way.wait()
    assert b"the trials are being stopped" in said

    def states() -> set[str]:
        jobs = json.loads(ugro("status", "--json").stdout)["jobs"]
        return {job["state"] for job in jobs if job["name"] == "trial-train"}

    wait_until(lambda: states() <= {"succeeded", "cancelled"}, LIMIT_S, "the trials to end")
    assert "cancelled" in states()
    ran(ugro)


@pytest.mark.proof
def test_the_trials_of_an_agent_that_is_killed_end_when_it_is_back(ugro: Ugro) -> None:
    under_way = ugro.start("plan", *words_of(ugro, "--fresh"), "--wait")
    try:
        wait_until(lambda: len(list((ugro.home / "marks").iterdir())) == 3, LIMIT_S, "all trials to begin")
        os.kill(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"], signal.SIGKILL)
        _, said = under_way.communicate(timeout=LIMIT_S)
    finally:
        under_way.kill()
        under_way.wait()
    assert b"Traceback" not in said

    def under_way_now() -> list[str]:
        jobs = json.loads(ugro("status", "--json").stdout)["jobs"]
        return [job["state"] for job in jobs if job["state"] not in ("succeeded", "failed", "cancelled")]

    wait_until(lambda: not under_way_now(), LIMIT_S, "the trials to end")
    ran(ugro)


REAL = """
import warnings; warnings.simplefilter("ignore")
from pathlib import Path
import torch, ugro.train as ut
torch.set_num_threads(1)
run = ut.init(seed=1)
model = run.wrap(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, optimizer=optimizer)
loader = run.loader(torch.utils.data.TensorDataset(torch.randn(200, 64), torch.zeros(200, 1)), global_batch=64)
for epoch in run.epochs(3):
    for x, y in loader:
        with run.step() as step:
            step.backward(step.loss(torch.nn.functional.mse_loss(model(x), y)))
            optimizer.step(); optimizer.zero_grad()
    run.checkpoint()
    Path("epoch").write_text("over")
"""


@pytest.mark.proof
def test_real_steps_are_measured_and_a_trial_leaves_nothing(ugro: Ugro, tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text(REAL)
    words = ["real.py", "--workdir", str(tmp_path), "--only", "n001", "--only", "n002"]
    done = ugro("plan", *words, "--seconds", "4", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert {tuple(one["nodes"]) for one in plan["predictions"]} == {("n001",), ("n002",), ("n001", "n002")}
    both = next(one for one in plan["predictions"] if len(one["nodes"]) == 2)
    assert both["links"] == "trial"
    assert both["communication_s"] > 0
    assert plan["parameters"] == 64 * 256 + 256 + 256 + 1
    memory = plan["memory"]
    assert {(one["way"], one["node"]) for one in memory if one["way"] != "pipeline"} == {
        (way, node) for way in ("ddp", "fsdp") for node in ("n001", "n002")
    }
    assert {one["activations"] for one in memory if one["way"] == "ddp"} == {32 * 4 * (64 + 256 + 1 + 1)}
    assert all(one["at_once"] == one["samples"] and one["optimizer"] for one in memory)
    planned = ugro("launch", *words, "--nodes", "2", "--dry-run")
    assert "memory   fsdp     fits: " in planned.stdout, planned.stdout + planned.stderr
    assert not plan["left_out"]
    trials = [job for job in json.loads(ugro("status", "--json").stdout)["jobs"] if job["name"] == "trial-real"]
    assert {job["state"] for job in trials} == {"succeeded"}
    assert len(trials) == 3
    for job in trials:
        files = json.loads(ugro("results", str(job["id"]), "--json").stdout)["job"]["results"]["listed"]
        assert not [one for one in files if "checkpoint" in one["name"] or one["name"] == "epoch"], files
