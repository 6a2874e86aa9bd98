"""``ugro sweep`` on this machine: from the command line and from a file, killed, stopped, resumed, and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.integration.sweeps import over, shown
from tests.rig.terminal import Screen
from tests.rig.waiting import wait_until

_OVER_S = 60
SCRIPT = """
import argparse, json, os, time
words = argparse.ArgumentParser()
words.add_argument("--lr", type=float, default=0.1)
words.add_argument("--size", type=int, default=1)
words.add_argument("--steps", type=int, default=1)
words.add_argument("--fail")
given, _ = words.parse_known_args()
with open(os.path.join(os.environ["MARKS"], "begun"), "a") as file:
    file.write(f"{given.lr:g} {given.size} {os.environ['UGRO_PARAM_LR']}\\n")
for step in range(1, given.steps + 1):
    with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "val/loss": given.lr + given.size + 1 / step}) + "\\n")
    time.sleep(0.1 if given.steps > 1 else 0)
if given.fail:
    raise SystemExit(3)
"""
WANDB = """
program: train.py
project: demo
method: bayes
metric: {name: val/loss, goal: minimize}
parameters:
  lr: {distribution: log_uniform_values, min: 1e-5, max: 1e-1}
  size: {values: [1, 2, 4]}
  steps: {value: 3}
early_terminate: {type: hyperband, min_iter: 3}
run_cap: 6
"""


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        (ugro.home / "code").mkdir()
        (ugro.home / "code" / "train.py").write_text(SCRIPT)
        (ugro.home / "code" / "sweep.yaml").write_text(WANDB)
        (ugro.home / "cwd" / "mistyped.yaml").write_text(WANDB.replace("parameters", "paramters"))
        (ugro.home / "cwd" / "empty.yaml").write_text("# nothing yet\n")
        (ugro.home / "cwd" / "nan.yaml").write_text(WANDB.replace("[1, 2, 4]", "[1, .nan, 2]"))
        (ugro.home / "cwd" / "metric.yaml").write_text(WANDB.replace("{name: val/loss, goal: minimize}", "val/loss"))
        yield ugro


def started(ugro: Ugro, *words: str, name: str) -> dict[str, Any]:
    marks = ugro.home / name
    marks.mkdir(exist_ok=True)
    own = ["--name", name, "--cwd", str(ugro.home / "code"), "--env", f"MARKS={marks}", "--json"]
    done = ugro("sweep", *own, *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["sweep"]
    return found


def begun(ugro: Ugro, name: str) -> list[str]:
    path = ugro.home / name / "begun"
    return sorted(path.read_text().splitlines()) if path.exists() else []


@pytest.mark.proof
def test_a_grid_is_made_exactly_once_though_its_agent_is_killed(ugro: Ugro) -> None:
    first = started(ugro, "train.py", "--lr", "1e-5,2e-5", "--size", "1,2", "--metric", "val/loss", name="grid")
    assert (first["method"], first["total"], first["parameters"]) == ("grid", 4, ["lr", "size"])
    wait_until(lambda: begun(ugro, "grid"), _OVER_S, "a trial to begin")
    os.kill(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"], signal.SIGKILL)
    found = over(ugro, "grid")
    assert (found["state"], found["reason"]) == ("done", "every point was tried: 4")
    assert begun(ugro, "grid") == ["1e-05 1 1e-05", "1e-05 2 1e-05", "2e-05 1 2e-05", "2e-05 2 2e-05"]
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 4, found["trials"]
    assert found["best"] == 1
    best = ugro("sweep", "best", "grid")
    assert best.stdout.splitlines()[0].startswith("trial 1 (job ")
    assert "  size = 1" in best.stdout
    table = ugro("sweep", "status", "grid")
    assert table.stdout.splitlines()[0].split("\t")[:5] == ["trial", "job", "state", "lr", "size"]
    assert "best: trial 1, val/loss 2.00001 with lr 1e-05, size 1" in table.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["train.py", "--lr", "0.1"], 2, "nothing to search"),
        (["train.py", "--lr", "log:0..1"], 2, "begins above 0"),
        (["train.py", "--lr", "0.1..0.5", "--method", "grid"], 2, "a grid cannot try all values"),
        (["train.py", "--lr", "0.1..0.5", "--method", "bayes"], 2, "method bayes needs one"),
        (["train.py", "--lr", "1,2", "--method", "cmaes", "--metric", "loss"], 2, "all of these are choices"),
        (["other.py", "--lr", "1,2"], 2, "other.py: no such file"),
        (["-f", "none.yaml"], 2, "none.yaml: no such file"),
        (["-f", "mistyped.yaml"], 2, "paramters: not supported here\nhint:  did you mean parameters?"),
        (["-f", "metric.yaml"], 2, "metric.yaml: metric: expected a map of keys to values"),
        (["-f", "empty.yaml"], 2, "the file is empty\nhint:  for example: {program: train.py, method: grid"),
        (["-f", "nan.yaml"], 2, "parameters.size.values: expected finite numbers, got nan among them"),
        (["train.py", "--lr", "1,2", "--gpu-hours", "nan"], 2, "expected a number, got nan"),
        (["train.py", "--lr", "1,2", "--metric", "loss", "--target", "nan"], 2, "expected a number, got nan"),
        (["--trials", "3"], 2, "a script or a sweep file is needed"),
        (["status", "none"], 4, "there is no sweep 'none'"),
        (["stop", "none"], 4, "there is no sweep 'none'"),
        (["resume", "none", "--trials", "x"], 2, "expected a number such as 60 or +20"),
        (["train.py", "--lr", "1,2", "--nodes", "9"], 3, ""),
    ],
)
def test_a_mistake_is_one_clear_error(ugro: Ugro, words: list[str], code: int, says: str) -> None:
    is_new = words[0] not in ("status", "stop", "resume")
    done = ugro("sweep", *words, *(["--workdir", str(ugro.home / "code")] if is_new else []))
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert done.stderr.count("error:") == 1


def test_a_sweep_of_a_recipe_compares_what_the_recipe_says_of_itself(ugro: Ugro) -> None:
    def planned(*words: str) -> Any:
        done = ugro("sweep", "--recipe", "causal_lm", "--tiny", "--lr", "1e-4,2e-4", "--dry-run", "--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["plan"]["metric"]

    assert planned() == "val/loss"
    assert planned("--metric", "val/perplexity") == "val/perplexity"
    assert planned("--eval-split", "none") is None


def test_a_dry_run_shows_the_first_trials_and_starts_nothing(ugro: Ugro) -> None:
    words = ["train.py", "--lr", "1e-5,2e-5", "--size", "1..3", "--steps", "7", "--metric", "val/loss", "--dry-run"]
    before = ugro("sweep", "ls", "--json").stdout
    shown = ugro("sweep", *words, "--workdir", str(ugro.home / "code"))
    assert shown.returncode == 0, shown.stderr
    assert "size  whole numbers from 1 to 3" in shown.stdout
    assert "points: 6; at most 6 trials" in shown.stdout
    assert "  1  train.py --steps 7 --lr=1e-05 --size=1" in shown.stdout
    assert "the first trial would" in shown.stdout
    found = ugro("sweep", *words, "--method", "qmc", "--json", "--workdir", str(ugro.home / "code"))
    plan = json.loads(found.stdout)["plan"]
    assert (plan["method"], plan["points"], len(plan["first"])) == ("qmc", 6, 5), found.stderr
    assert ugro("sweep", "ls", "--json").stdout == before


@pytest.mark.proof
@pytest.mark.parametrize("method", ["cmaes", "qmc", "gp"])
def test_a_sampler_of_optuna_runs_in_the_agent(ugro: Ugro, method: str) -> None:
    words = ["train.py", "--lr", "log:1e-5..1e-1", "--size", "1..9", "--metric", "val/loss", "--trials", "14"]
    started(ugro, *words, "--method", method, name=method)
    found = over(ugro, method)
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 14, found
    assert len(begun(ugro, method)) == 14


@pytest.mark.proof
def test_a_file_of_wandb_runs_unchanged_and_its_best_is_launched(ugro: Ugro) -> None:
    started(ugro, "-f", str(ugro.home / "code" / "sweep.yaml"), name="wandb")
    found = over(ugro, "wandb")
    assert (found["state"], len(found["trials"])) == ("done", 6)
    assert found["notes"] == ["project is W&B's, and has no meaning here"]
    states = {trial["state"] for trial in found["trials"]}
    assert states <= {"complete", "pruned"}
    assert len({json.dumps(trial["parameters"]) for trial in found["trials"]}) == 6
    done = ugro("sweep", "best", "wandb", "--launch", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    assert ugro("wait", str(job["id"])).returncode == 0
    best = found["trials"][found["best"] - 1]["parameters"]
    assert f"--lr={best['lr']}" in job["spec"]["argv"]
    if sum(trial["state"] == "complete" for trial in found["trials"]) >= 4:
        rows = ugro("sweep", "importance", "wandb").stdout.splitlines()
        assert rows[0].startswith("parameter")


@pytest.mark.proof
def test_a_stopped_sweep_makes_its_open_points_again_and_can_be_extended(ugro: Ugro) -> None:
    started(ugro, "train.py", "--lr", "1,2,3", "--steps", "600", "--metric", "val/loss", "--parallel", "1", name="halt")
    wait_until(lambda: begun(ugro, "halt"), _OVER_S, "a trial to begin")
    assert ugro("sweep", "stop", "halt").returncode == 0
    found = over(ugro, "halt")
    assert (found["state"], [trial["state"] for trial in found["trials"]]) == ("stopped", ["stopped"])
    assert ugro("sweep", "resume", "halt", "--parallel", "2", "-d").returncode == 0
    wait_until(lambda: len(begun(ugro, "halt")) == 3, _OVER_S, "two points to begin")
    assert begun(ugro, "halt") == ["1 1 1", "1 1 1", "2 1 2"], "the stopped one first"
    assert ugro("sweep", "stop", "halt").returncode == 0
    over(ugro, "halt")

    words = ["train.py", "--lr", "0.0..1.0", "--metric", "val/loss", "--trials", "2", "--method", "random"]
    started(ugro, *words, name="more")
    assert len(over(ugro, "more")["trials"]) == 2
    assert ugro("sweep", "resume", "more", "--trials", "+2").returncode == 0
    assert len(shown(ugro, "more")["trials"]) == 4


@pytest.mark.proof
def test_the_next_trial_is_submitted_while_a_pruned_one_ends_and_never_runs_beside_it(ugro: Ugro) -> None:
    words = ["train.py", "--lr", "0.1,0.2,0.3,0.4", "--steps", "20", "--metric", "val/loss", "--prune", "asha"]
    started(ugro, *words, "--parallel", "1", name="handover")
    found = over(ugro, "handover")
    assert [trial["state"] for trial in found["trials"]] == ["complete", "pruned", "pruned", "pruned"]
    assert all(trial["step"] < 20 for trial in found["trials"][1:]), found["trials"]
    jobs = [json.loads(ugro("status", str(trial["job"]), "--json").stdout)["job"] for trial in found["trials"]]
    for one, following in pairwise(jobs):
        assert one["ended_at"] <= following["started_at"], (one, following)
    for one, following in pairwise(jobs[1:]):
        assert following["submitted_at"] <= one["ended_at"], "it was made ready before"


def test_a_sweep_of_which_no_trial_succeeds_fails_and_says_how_to_log_the_metric(ugro: Ugro) -> None:
    (ugro.home / "code" / "silent.py").write_text("print('loss 0.5')\n")
    words = ["silent.py", "--lr", "1,2", "--metric", "val/loss", "--name", "silent", "--cwd", str(ugro.home / "code")]
    done = ugro("sweep", *words)
    assert done.returncode == 1
    assert "sweep silent is failed: every point was tried: 2; none succeeded: job" in done.stderr
    assert 'it logged no metrics; write lines such as {"step": 1, "val/loss": 0.5} to metrics.jsonl' in done.stderr
    assert shown(ugro, "silent")["state"] == "failed"


def test_a_trial_whose_job_waits_is_not_shown_as_running(ugro: Ugro) -> None:
    whole = ["--cpus", str(os.cpu_count() or 1)]
    started(ugro, "train.py", "--lr", "1,2", "--steps", "600", "--metric", "val/loss", *whole, name="waits")

    def is_running() -> bool:
        trials = shown(ugro, "waits")["trials"]
        return len(trials) == 2 and trials[0]["state"] == "running"

    wait_until(is_running, _OVER_S, "the first of two trials to run")
    first, second = shown(ugro, "waits")["trials"]
    assert (first["state"], second["state"], second["job"] is not None) == ("running", "pending", True)
    job = json.loads(ugro("status", str(second["job"]), "--json").stdout)["job"]
    assert job["state"] == "queued"
    assert "1 running" in ugro("sweep", "status", "waits").stderr
    assert ugro("sweep", "stop", "waits").returncode == 0
    over(ugro, "waits")


@pytest.mark.proof
def test_failures_and_a_missing_metric_stop_a_sweep_with_the_reason(ugro: Ugro) -> None:
    started(ugro, "train.py", "--lr", "1,2,3,4,5", "--fail", "yes", name="bad")
    found = over(ugro, "bad")
    assert (found["state"], len(begun(ugro, "bad")) < 5) == ("failed", True)
    assert "trials failed" in found["reason"]
    assert ugro("sweep", "resume", "bad", "-d").returncode == 0
    found = over(ugro, "bad")
    assert (found["state"], len(set(begun(ugro, "bad")))) == ("failed", 5), "what failed before does not stop it again"
    started(ugro, "train.py", "--lr", "1,2,3,4,5", "--metric", "acc", name="unnamed")
    found = over(ugro, "unnamed")
    assert "without a finite value of acc; it logged: val/loss" in found["reason"]


@pytest.mark.proof
def test_ctrl_c_detaches_and_a_terminal_shows_the_sweep_live(ugro: Ugro, tmp_path: Path) -> None:
    (ugro.home / "live").mkdir()
    words = ["train.py", "--lr", "1,2", "--steps", "600", "--metric", "val/loss", "--name", "live", "--parallel", "1"]
    own = ["--cwd", str(ugro.home / "code"), "--env", f"MARKS={ugro.home / 'live'}"]
    with closing(Screen(ugro, tmp_path, 120, 30)) as screen:
        screen.type(" ".join(["ugro", "sweep", *words, *own]))
        seen = screen.wait_for("best: trial 1, val/loss", _OVER_S)
        assert "x1b" not in seen, "no code is shown as text"
        assert re.search(r"^ +1 +\d+ +running ", seen, re.MULTILINE)
        coloured = screen.text("-e")
        assert "\x1b[36m1\x1b[" in coloured, "its table has colours"
        screen.press("C-c")
        screen.wait_for("detached: sweep live continues", _OVER_S)
    assert shown(ugro, "live")["state"] == "running"
    assert ugro("sweep", "stop", "live").returncode == 0
    assert over(ugro, "live")["state"] == "stopped"
    assert ugro("sweep", "report", "live", "-o", str(tmp_path / "live.html")).returncode == 0
    assert "<h1>Sweep live</h1>" in (tmp_path / "live.html").read_text()
