"""Whole trainings of real ranks: every sample once per epoch, ended and resumed, with more or fewer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.rig import ranks, resuming

SCRIPT = ["-m", "tests.rig.epochs"]
BATCH, EPOCHS = 20, resuming.EPOCHS
LIMIT_S = 150

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights after a training by one process, without a launcher and without UGRO."""
    folder = tmp_path_factory.mktemp("alone")
    unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("UGRO_") and name not in unset}
    env |= {"RESULT": str(folder / "result_0.json"), "PYTHONPATH": str(ranks.ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *SCRIPT], env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(ranks.metrics(folder / "ugro_output" / "metrics.jsonl", "log")) == EPOCHS * 9
    assert _total_steps(folder / "ugro_output") == EPOCHS * 9
    assert list((folder / "ugro_output" / "checkpoints").iterdir())
    return resuming.flat(json.loads((folder / "result_0.json").read_text())["weights"])


@pytest.mark.proof
@pytest.mark.parametrize(("count", "workers"), [(3, 0), (2, 2)])
def test_an_epoch_has_every_sample_once_while_shares_change(
    tmp_path: Path, undisturbed: list[float], count: int, workers: int
) -> None:
    started = ranks.start([*SCRIPT, "--workers", str(workers)], tmp_path, count)
    started.wait(LIMIT_S)
    results = started.results()
    assert resuming.seen(tmp_path) == resuming.everything_once()
    for result in results:
        assert resuming.flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
    plans = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "plan")
    assert len(plans) > 1, "equal shares were kept"
    assert all(sum(plan["shares"]) == BATCH and plan["reason"] for plan in plans)
    if not workers:
        _expect_profile(tmp_path / "output", count)


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_run_resumes_in_the_middle_of_an_epoch_with_another_number_of_ranks(
    tmp_path: Path, undisturbed: list[float], before: int, after: int
) -> None:
    weights = resuming.resumed_elsewhere(SCRIPT, tmp_path, before, after)
    assert weights == [pytest.approx(undisturbed, rel=1e-9)] * after
    assert resuming.seen(tmp_path) == resuming.everything_once()


@pytest.mark.proof
def test_no_thread_of_pytorchs_outlives_the_interpreter(tmp_path: Path) -> None:
    """Such a thread aborts a rank that has done all it was to do, now and then."""
    text = """
import torch, ugro.train as ut
run = ut.init()
model = run.wrap(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in run.loader(torch.utils.data.TensorDataset(torch.randn(32, 2)), global_batch=8):
    with run.step() as step:
        step.backward(step.loss(model(batch[0]).square().mean()))
        optimizer.step()
        optimizer.zero_grad()
"""
    for names in ranks.threads_at_exit(text, tmp_path, 2):
        assert [name for name in names if "gloo" in name] == []


@pytest.mark.proof
@pytest.mark.parametrize(("leaves", "code"), [("RuntimeError('as asked')", 1), ("SystemExit(7)", 7)])
def test_a_rank_that_leaves_in_the_middle_of_a_step_keeps_its_code_and_nobody_waiting(
    tmp_path: Path, leaves: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch, ugro.train as ut
run = ut.init()
model = run.wrap(torch.nn.Linear(2, 2))
for batch in run.loader(torch.utils.data.TensorDataset(torch.randn(64, 2)), global_batch=8):
    with run.step() as step:
        loss = step.loss(model(batch[0]).square().mean())
        if run.rank == 1 and run.progress.step == 3:
            raise {leaves}
        step.backward(loss)
"""
    )
    started = ranks.start([str(script)], tmp_path, 2)
    assert started.wait() == [1, code], started.logs()


@pytest.mark.proof
def test_a_run_that_is_told_to_end_saves_first_and_goes_on_where_it_was(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    first = tmp_path / "first"
    resuming.tell_to_end(ranks.start([*SCRIPT, "--pause", "0.004"], first, 2), [1, 0])
    assert len(list((first / "output" / "checkpoints").iterdir())) == 1
    records = (first / "output" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["attempt"] == 1 for line in records)
    variables = {**resuming.resuming(first), "UGRO_ATTEMPT": "2"}
    assert resuming.resumed(SCRIPT, tmp_path / "again", 2, variables)[0] == pytest.approx(undisturbed, rel=1e-9)
    assert resuming.seen(tmp_path) == resuming.everything_once()
    assert all(record["attempt"] == 2 for record in ranks.metrics(tmp_path / "again/output/metrics.jsonl", "log"))
    assert _total_steps(tmp_path / "again/output") == EPOCHS * 9, "the steps of the first attempt count"


@pytest.mark.proof
def test_torchruns_ranks_train_as_well(tmp_path: Path, undisturbed: list[float]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ranks.ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    env |= {"RESULT": str(tmp_path / "result_0.json"), "UGRO_OUTPUT": str(tmp_path / "output")}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, *SCRIPT],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = json.loads((tmp_path / "result_0.json").read_text())["weights"]
    assert resuming.flat(weights) == pytest.approx(undisturbed, rel=1e-9)


def _total_steps(output: Path) -> int:
    last = ranks.metrics(output / "metrics.jsonl", "progress")[-1]
    return int(last["total_steps"])


def _expect_profile(output: Path, count: int) -> None:
    profile = ranks.metrics(output / "metrics.jsonl", "profile")
    assert [record["step"] for record in profile] == list(range(EPOCHS * 9))
    phases = ("own_s", "data_s", "forward_s", "backward_s", "waiting_s", "communication_s", "optimizer_s")
    for record in profile:
        assert sum(record["shares"]) == record["samples"] in (BATCH, resuming.SAMPLES % BATCH)
        assert record["loss"] > 0
        assert all(len(record[phase]) == count and min(record[phase]) >= 0 for phase in phases)
        assert min(record["waiting_s"]) == 0
    # Each rank sleeps longer for a sample than the one before: that is its own time, and not the others'.
    equal = [record["own_s"] for record in profile[2:] if record["shares"] == [7, 7, 6]]
    assert median(own[2] / own[0] for own in equal) > 1.3
    for rank in range(1, count):
        assert len(ranks.metrics(output / f"metrics.rank_{rank}.jsonl", "log")) == EPOCHS * 9
