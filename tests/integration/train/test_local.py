"""Local SGD on real ranks: the averages are exact, every sample is used once, late updates count less or not at all.

That ranks of unequal speed average exactly is tested in ``test_gradients``, with ranks that run already.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks
from tests.rig.waiting import wait_until

SCRIPT = ["-m", "tests.rig.rounds"]
SAMPLES, EPOCHS, STEPS = 643, 2, 54
LIMIT_S = 150

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch"),
]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return ranks.metrics(folder / "output" / "metrics.jsonl", "round")


def seen(*folders: Path) -> Counter[str]:
    lines = [line for one in folders for path in one.glob("*.seen") for line in path.read_text().splitlines()]
    return Counter(lines)


def everything_once(epochs: int = EPOCHS) -> Counter[str]:
    return Counter(f"{epoch} {index}" for epoch in range(epochs) for index in range(SAMPLES))


def computed_alone(results: list[Any], outer: str = "average", *, single: bool = False) -> list[Any]:
    """The weights after each epoch, by one process."""
    from tests.rig.rounds import alone

    found = alone([result["steps"] for result in results], outer, single=single)
    return [pytest.approx(one, rel=1e-9, abs=2e-3 if single else 1e-12) for one in found]


@pytest.mark.proof
def test_the_faster_rank_takes_more_steps_in_a_round(tmp_path: Path) -> None:
    ranks.start([*SCRIPT, "--sgd", "--lr", "0.05", "--pause", "0.0003"], tmp_path, 2).results()
    assert any(one["steps"][0] > one["steps"][1] for one in rounds_of(tmp_path))


@pytest.mark.proof
def test_one_step_in_each_round_is_sgd_on_all_samples_of_the_round(tmp_path: Path) -> None:
    flags = ["--sgd", "--lr", "0.05", "--pause", "0", "--round", "0.000001", "--epochs", str(EPOCHS)]
    results = ranks.start([*SCRIPT, *flags], tmp_path, 3).results()
    assert [one["steps"] for one in rounds_of(tmp_path)[1:20]] == [[1, 1, 1]] * 19
    assert results[2]["weights"] == computed_alone(results)


@pytest.mark.proof
def test_diloco_is_a_nesterov_step_with_the_average(tmp_path: Path) -> None:
    flags = ["--sgd", "--lr", "0.05", "--outer", "nesterov", "--workers", "2"]
    results = ranks.start([*SCRIPT, *flags], tmp_path, 2).results()
    assert seen(tmp_path) == everything_once()
    assert results[1]["weights"] == computed_alone(results, "nesterov")


@pytest.mark.proof
def test_changes_travel_in_half_precision_where_that_is_enough(tmp_path: Path) -> None:
    results = ranks.start([*SCRIPT, "--single", "--sgd", "--lr", "0.05"], tmp_path, 2).results()
    found = rounds_of(tmp_path)
    assert all(one["exchange_bytes"] == 2 * 49 and one["full_precision"] == 0 for one in found)
    assert results[0]["weights"] == results[1]["weights"], "all ranks have one model after an epoch, to the last bit"
    assert results[0]["weights"] == computed_alone(results, single=True)


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_a_run_that_is_told_to_end_resumes_with_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    """In the middle of a round, which each rank ends after its step; all save what is left of it."""
    first = tmp_path / "first"
    started = ranks.start([*SCRIPT, "--round", "30", "--pause", "0.004"], first, before)
    try:
        wait_until(lambda: len(rounds_of_or_none(first)) >= 2, LIMIT_S, "the first rounds")
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.wait(LIMIT_S) == [128 + signal.SIGTERM] * before, started.logs()
    finally:
        started.end()
    assert sum(seen(first).values()) < SAMPLES
    resume = {"UGRO_RESUME_DIR": str(first / "output" / "checkpoints"), "UGRO_ATTEMPT": "2"}
    again = ranks.start(SCRIPT, tmp_path / "again", after, resume)
    results = again.results()
    assert seen(first, tmp_path / "again") == everything_once()
    assert results[0]["weights"] == results[-1]["weights"]
    assert results[0]["step"] == EPOCHS * STEPS


def rounds_of_or_none(folder: Path) -> list[dict[str, Any]]:
    return rounds_of(folder) if (folder / "output" / "metrics.jsonl").exists() else []


@pytest.mark.proof
def test_a_checkpoint_in_the_middle_of_an_epoch_waits_for_the_end_of_the_round(tmp_path: Path) -> None:
    flags = ["--checkpoint-at", "20", "--epochs", "1", "--round", "0.1"]
    ranks.start([*SCRIPT, *flags], tmp_path / "first", 2).results()
    written = ranks.metrics(tmp_path / "first" / "output" / "metrics.jsonl", "checkpoint")
    assert len(written) == 2, "one when the round was over, one after the epoch"
    assert 0 < written[0]["step"] < STEPS
    again = ranks.start([*SCRIPT, "--epochs", "1"], tmp_path / "again", 2, {"UGRO_RESUME_DIR": written[0]["path"]})
    again.results()
    late = seen(tmp_path / "again")
    assert max(late.values()) == 1
    assert sum(late.values()) < SAMPLES
    # It also goes on synchronously: the rounds before had ended for all ranks.
    steps = ranks.start(["-m", "tests.rig.rounds", "--epochs", "1"], tmp_path / "step", 1, {
        "UGRO_RESUME_DIR": written[0]["path"],
    })  # fmt: skip
    steps.results()
    assert seen(tmp_path / "step") == late


@pytest.mark.proof
@pytest.mark.parametrize("stale", ["0", "1"])
def test_ranks_that_leave_their_loop_in_the_middle_of_a_round_have_one_model(tmp_path: Path, stale: str) -> None:
    """Each after another number of steps. What the first one leaves ends the round of all."""
    flags = ["--sgd", "--lr", "0.05", "--leave-at", "3", "--stale", stale, "--epochs", "2", "--round", "0.2"]
    results = ranks.start([*SCRIPT, *flags], tmp_path, 3).results()
    assert all(result["weights"] == results[0]["weights"] for result in results)
    used = seen(tmp_path)
    assert max(used.values()) == 1
    assert 0 < sum(line.startswith("0 ") for line in used) < SAMPLES, "the first epoch ends early"
    assert sum(line.startswith("1 ") for line in used) == SAMPLES
    if stale == "0":
        assert results[0]["weights"] == computed_alone(results)


@pytest.mark.proof
def test_a_rank_that_becomes_slow_ends_its_round_early_and_others_take_the_rest(tmp_path: Path) -> None:
    flags = ["--slow-from", "20", "--slow", "0.3", "--epochs", "1", "--round", "0.5"]
    ranks.start([*SCRIPT, *flags], tmp_path, 2).results()
    assert seen(tmp_path) == everything_once(1)
    found = rounds_of(tmp_path)
    slowed = [one for one in found if one["planned_s"] and one["own_s"][1] > 1.5 * one["planned_s"]]
    assert slowed
    assert max(one["own_s"][1] for one in found) < 6, "the others have waited for the whole of it"
    assert found[-1]["samples"][0] > 5 * found[-1]["samples"][1]


@pytest.mark.proof
def test_late_updates_count_and_too_late_ones_are_rejected_and_counted(tmp_path: Path) -> None:
    flags = ["--slow-from", "8", "--slow", "0.25", "--round", "0.2", "--epochs", "1", "--stale", "1", "--lr", "0.005"]
    results = ranks.start([*SCRIPT, *flags, "--pause", "0.003"], tmp_path, 3).results()
    found = rounds_of(tmp_path)
    assert seen(tmp_path) == everything_once(1)
    assert any(one["absent"] == [1] for one in found), "the others waited for the slow rank"
    assert [one for one in found if one["rejected"] == [1]]
    counted = sum(one["samples"][1] for one in found if one["rejected"] == [1])
    assert found[-1]["rejected_samples"] == counted > 0
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]


@pytest.mark.proof
def test_the_exchange_goes_on_while_the_next_round_is_computed(tmp_path: Path) -> None:
    results = ranks.start([*SCRIPT, "--stale", "1", "--round", "0.2"], tmp_path, 3).results()
    found = rounds_of(tmp_path)
    assert seen(tmp_path) == everything_once()
    assert results[0]["weights"] == results[2]["weights"]
    assert not any(one["rejected"] for one in found)
    overlapped = [one for one in found if one["exchange_s"] > 2 * max(one["exposed_s"])]
    assert overlapped


@pytest.mark.proof
def test_a_device_without_memory_for_its_batches_accumulates(tmp_path: Path) -> None:
    results = ranks.start([*SCRIPT, "--memory", "3", "--epochs", "1"], tmp_path, 2).results()
    assert seen(tmp_path) == everything_once(1)
    assert [result["failures"] for result in results] == [0, 1], "it was found out once"


@pytest.mark.proof
@pytest.mark.parametrize("stale", ["0", "1"])
def test_a_rank_that_dies_keeps_nobody_waiting(tmp_path: Path, stale: str) -> None:
    started = ranks.start([*SCRIPT, "--die-at", "15", "--stale", stale, "--round", "0.3"], tmp_path, 3)
    codes = started.wait(60)
    assert codes[1] == 9
    assert all(code not in (0, None) for code in codes), started.logs()


@pytest.mark.proof
def test_scripts_that_need_ranks_in_step_are_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, torch, ugro.train as ut
from pathlib import Path
run = ut.init()  # the launcher has chosen the mode
model = run.wrap(torch.nn.Linear(2, 1), compress="fp16")
told = []
for batch in run.loader(torch.utils.data.TensorDataset(torch.randn(64, 2)), global_batch=8):
    with run.step() as step:
        step.backward(step.loss(model(batch[0]).square().mean()))
    if not told:
        try:
            run.gather(1.0)
        except Exception as error:
            told.append(str(error))
assert run.gather(float(run.rank)) == [[0.0], [1.0]]
import json
Path(os.environ["RESULT"]).write_text(json.dumps(told))
"""
    )
    results = ranks.start([str(script)], tmp_path, 2, {"UGRO_SYNC": "local", "UGRO_ROUND_S": "0.1"}).results()
    assert all("not in the same step" in result[0] for result in results)
    assert json.loads((tmp_path / "result_0.json").read_text())
    [model] = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "model")
    assert model["comm_hook"] is None, "there are no gradients to compress"
