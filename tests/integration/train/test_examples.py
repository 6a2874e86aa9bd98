"""The examples, small: each alone with data of its own or of a user, and one on two ranks."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rig import ranks
from tests.rig.waiting import wait_until

EXAMPLES = ranks.ROOT / "examples"
LIMIT_S = 150

# Looked for and not imported: every process that collects tests would load it.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch"),
]


def alone(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Without a launcher and without UGRO."""
    unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("UGRO_") and key not in unset}
    env |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(EXAMPLES / name), "--tiny", *words]
    return subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def losses(path: Path) -> list[float]:
    return [float(record["values"]["loss"]) for record in ranks.metrics(path, "log")]


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("One line of it, and another one; so it goes on.\n" * 200)
    return path


def write_pictures(folder: Path) -> Path:
    for number, colour in enumerate(("red", "blue")):
        (folder / "pictures" / colour).mkdir(parents=True)
        for count in range(32):
            pixels = bytes([10 * number + count, 100, 200 - 150 * number]) * (40 * 30)
            (folder / "pictures" / colour / f"{count}.ppm").write_bytes(b"P6\n40 30\n255\n" + pixels)
    return folder / "pictures"


@pytest.mark.proof
@pytest.mark.parametrize("name", ["train_gpt.py", "train_bert.py", "train_resnet50.py"])
def test_an_example_learns_alone_and_leaves_metrics_and_a_checkpoint(tmp_path: Path, name: str) -> None:
    done = alone(tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert "epoch 0 step 0 of " in done.stdout
    found = losses(tmp_path / "ugro_output" / "metrics.jsonl")
    assert len(found) >= 20
    assert all(math.isfinite(loss) for loss in found)
    assert sum(found[-4:]) < sum(found[:4])
    assert list((tmp_path / "ugro_output" / "checkpoints").glob("step_*.pt"))


@pytest.mark.proof
def test_examples_read_data_of_a_user(tmp_path: Path) -> None:
    text, pictures = write_text(tmp_path), write_pictures(tmp_path)
    for name, path in (("train_gpt.py", text), ("train_bert.py", text), ("train_resnet50.py", pictures)):
        done = alone(tmp_path, name, "--data", str(path))
        assert done.returncode == 0, done.stderr
        assert "epoch 0 step 0 of " in done.stdout


@pytest.mark.proof
def test_data_that_are_no_use_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "pictures" / "none").mkdir(parents=True)
    for name, data, words in (
        ("train_gpt.py", "short.txt", "too short"),
        ("train_resnet50.py", "pictures", "no images"),
    ):
        done = alone(tmp_path, name, "--data", data)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_an_example_runs_on_two_ranks(tmp_path: Path) -> None:
    started = ranks.start([str(EXAMPLES / "train_gpt.py"), "--tiny"], tmp_path, 2)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    steps = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "profile")
    assert steps
    assert all(step["samples"] == 32 and len(step["shares"]) == 2 for step in steps)


@pytest.mark.proof
def test_an_example_runs_with_local_sgd(tmp_path: Path) -> None:
    argv = [str(EXAMPLES / "train_gpt.py"), "--tiny", "--sync", "local", "--round-s", "0.5"]
    started = ranks.start(argv, tmp_path, 2)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    rounds = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "round")
    assert len(rounds) > 1
    steps = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "progress")[-1]["total_steps"]
    assert sum(sum(one["samples"]) for one in rounds) == 32 * steps
    found = losses(tmp_path / "output" / "metrics.jsonl")
    assert sum(found[-4:]) < sum(found[:4])


@pytest.mark.proof
def test_an_example_runs_with_compressed_gradients(tmp_path: Path) -> None:
    argv = [str(EXAMPLES / "train_gpt.py"), "--tiny", "--compress", "powersgd"]
    started = ranks.start(argv, tmp_path, 2)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    found = losses(tmp_path / "output" / "metrics.jsonl")
    assert sum(found[-4:]) < sum(found[:4])
    records = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "compression")
    assert records
    assert all(record["method"] == "powersgd" and record["error"] > 0 for record in records)


@pytest.mark.proof
def test_an_example_goes_on_without_a_rank_that_is_killed(tmp_path: Path) -> None:
    """What ``examples/elastic.yaml`` launches."""
    argv = [str(EXAMPLES / "train_gpt.py"), "--tiny", "--epochs", "6"]
    started = ranks.start_elastic(argv, tmp_path, 3, {})
    path = tmp_path / "output" / "metrics.jsonl"
    try:
        wait_until(lambda: path.exists() and len(losses(path)) > 4, LIMIT_S, "the first steps")
        started.ranks.processes[2].kill()
        assert started.ranks.wait(LIMIT_S) == [0, 0, -signal.SIGKILL], started.ranks.logs()
    finally:
        started.end()
    [change] = ranks.metrics(path, "members")
    assert change["lost"] == ["rank 2 (node2)"]
    steps = ranks.metrics(path, "progress")[-1]["total_steps"]
    assert ranks.metrics(path, "checkpoint")[-1]["step"] == steps


@pytest.mark.proof
@pytest.mark.skipif(find_spec("lightning") is None, reason="the libraries are not installed")
@pytest.mark.parametrize("name", ["hf_trainer.py", "accelerate_train.py", "lightning_train.py"])
def test_an_example_with_a_library_runs_alone_and_on_two_ranks(tmp_path: Path, name: str) -> None:
    done = alone(tmp_path, name, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "kept"
    variables = {"UGRO_CHECKPOINT_DIR": str(kept), "UGRO_BALANCE": "static", "UGRO_SPEEDS": "1,0.5"}
    argv = [str(EXAMPLES / name), "--tiny", "--epochs", "2"]
    started = ranks.start(argv, tmp_path / "two", 2, variables)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    steps = ranks.metrics(tmp_path / "two/output/metrics.jsonl", "profile")
    assert steps[0]["shares"][0] > steps[0]["shares"][1] > 0
    assert sum(step["loss"] for step in steps[-4:]) < sum(step["loss"] for step in steps[:4])
    assert len(list(kept.iterdir())) == 2, "one checkpoint for each epoch"


@pytest.mark.proof
def test_a_plain_script_needs_few_changed_lines_and_they_run(tmp_path: Path) -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ranks.ROOT / "docs" / "training.md").read_text(), re.M | re.S)
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 10
    ours = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))
    before = """import torch
dataset = torch.utils.data.TensorDataset(torch.randn(1024, 4), torch.randn(1024, 1))
criterion = torch.nn.functional.mse_loss
def Model():
    return torch.nn.Linear(4, 1)
"""
    (tmp_path / "train.py").write_text(before + ours)
    started = ranks.start(["train.py"], tmp_path, 2)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    assert len(ranks.metrics(tmp_path / "output" / "metrics.jsonl", "checkpoint")) == 10
