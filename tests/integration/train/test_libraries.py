"""Trainings with Hugging Face Trainer, Accelerate and Lightning on unequal ranks: the weights are those of one process.

The reference is always the library itself, without UGRO, in one process with the whole batch.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks
from tests.rig.waiting import wait_until

SAMPLES, EPOCHS, RANKS, BATCH = 67, 2, 3, 4
WHOLE = RANKS * BATCH
UNEQUAL = {"UGRO_BALANCE": "static", "UGRO_SPEEDS": "1,0.5,0.25"}
OTHERWISE_UNEQUAL = {"UGRO_BALANCE": "static", "UGRO_SPEEDS": "0.3,1,0.6"}
LIMIT_S = 300
HF = ["-m", "tests.rig.hf_training"]
OTHERS = {name: ["-m", "tests.rig.library_training", name] for name in ("accelerate", "lightning")}

# Looked for and not imported: every process that collects tests would load them.
pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "accelerate", "lightning")),
        reason="the libraries are not installed",
    ),
]


def alone(argv: Sequence[str], folder: Path) -> Any:
    (result,) = finished(ranks.start([*argv, "--plain"], folder, 1))
    return result


def finished(started: ranks.Ranks) -> list[Any]:
    started.wait(LIMIT_S)
    return started.results()


def expect_weights(results: Sequence[Any], reference: Any, *, error: float = 1e-9) -> None:
    wanted = flat(reference["weights"])
    for result in results:
        assert flat(result["weights"]) == pytest.approx(wanted, rel=error, abs=error)


def flat(values: Any) -> list[float]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]


# --- Hugging Face Trainer ---------------------------------------------------------------------------------------

SINGLE = 3e-6  # transformers computes norms and positions in single precision, whatever the model's is


def updates(folder: Path, training: int = 0) -> dict[int, list[int]]:
    """The samples of each update, of all ranks."""
    found: dict[int, list[int]] = {}
    for path in sorted(folder.glob(f"result_*.seen_{training}")):
        for line in path.read_text().splitlines():
            step, indices = json.loads(line)
            found[step] = found.get(step, []) + indices
    return found


def expect_every_sample_once(found: dict[int, list[int]], steps_per_epoch: int) -> None:
    for epoch in range(EPOCHS):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        assert sorted(index for step in steps for index in found[step]) == list(range(SAMPLES))


# Losses, how many batches are accumulated, and other options.
TRAININGS: list[tuple[str, int, list[str]]] = [
    ("tokens", 1, ["--evaluate"]),
    ("tokens", 2, []),
    ("tokens", 1, ["--no-average", "--workers", "2"]),
    ("mean", 1, ["--evaluate"]),
    ("mean", 2, ["--mixin"]),
    ("smooth", 1, []),
    ("func", 2, []),
    ("own", 2, []),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[list[Any]], Path]:
    """All trainings, one after the other: in one process by the Trainer alone, and on unequal ranks."""
    folder = tmp_path_factory.mktemp("trainer")
    by_one: list[str] = []
    by_three: list[str] = []
    for loss, accumulate, more in TRAININGS:
        by_one += ["--then", "--plain", "--loss", loss, "--batch", str(WHOLE * accumulate), *more]
        by_three += ["--then", "--loss", loss, "--accumulate", str(accumulate), *more]
    started = ranks.start([*HF, *by_three[1:]], folder / "three", RANKS, UNEQUAL)
    (reference,) = finished(ranks.start([*HF, *by_one[1:]], folder / "alone", 1))
    return reference, finished(started), folder / "three"


@pytest.mark.parametrize("number", range(len(TRAININGS)), ids=lambda number: "-".join(map(str, TRAININGS[number][:2])))
def test_the_trainer_on_unequal_ranks_trains_as_in_one_process(
    trained: tuple[list[Any], list[list[Any]], Path], number: int
) -> None:
    _, accumulate, more = TRAININGS[number]
    reference, results = trained[0][number], [of_rank[number] for of_rank in trained[1]]
    expect_weights(results, reference, error=SINGLE)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert (result["steps"], result["tokens"]) == (reference["steps"], reference["tokens"])
        assert len(result["evaluated"]) == (EPOCHS if "--evaluate" in more else 0)
    expect_every_sample_once(updates(trained[2], number), -(-SAMPLES // (WHOLE * accumulate)))
    plan = ranks.metrics(trained[2] / "output/metrics.jsonl", "plan")[number]
    assert sum(plan["shares"]) == WHOLE * accumulate
    assert plan["shares"][0] > plan["shares"][1] > plan["shares"][2]
    logged = ranks.metrics(trained[2] / "output/metrics.jsonl", "log")
    losses = [record["values"]["loss"] for record in logged if "loss" in record["values"]]
    assert losses == [loss for training in trained[1][0] for loss in training["losses"]]


DISTURBED = {
    "killed": ["--loss", "tokens", "--accumulate", "2", "--shuffle"],
    "smaller": ["--loss", "tokens", "--shuffle"],
    "told": ["--loss", "mean", "--shuffle"],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trainings that are disturbed below come to without that, in a random order."""
    words = [word for options in DISTURBED.values() for word in ["--then", *options]]
    (by_rank, *_) = finished(ranks.start([*HF, *words[1:]], tmp_path_factory.mktemp("calm"), RANKS, UNEQUAL))
    return dict(zip(DISTURBED, by_rank, strict=True))


def test_a_trainer_that_was_killed_goes_on_in_its_epoch_with_other_shares(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    words = [*DISTURBED["killed"], "--save-steps", "1"]
    first, kept = tmp_path / "first", tmp_path / "kept"
    started = ranks.start([*HF, *words, "--pause", "0.05"], first, RANKS, {**UNEQUAL, "UGRO_CHECKPOINT_DIR": str(kept)})
    try:
        wait_until(lambda: (kept / "checkpoint-2").exists(), LIMIT_S, "a checkpoint in the middle of the first epoch")
        for process in started.processes:
            process.kill()
    finally:
        started.end()
    resumed_from = max(kept.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    done = int(resumed_from.name.split("-")[1])
    after = {**OTHERWISE_UNEQUAL, "UGRO_RESUME_DIR": str(resumed_from)}
    results = finished(ranks.start([*HF, *words], tmp_path / "again", RANKS, after))
    expect_weights([one[0] for one in results], undisturbed["killed"], error=SINGLE)
    found = {step: indices for step, indices in updates(first).items() if step < done} | updates(tmp_path / "again")
    expect_every_sample_once(found, -(-SAMPLES // (2 * WHOLE)))


def test_a_trainer_resumes_with_fewer_ranks_and_keeps_its_global_batch(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    words = DISTURBED["smaller"]
    kept = tmp_path / "kept"
    before = {**UNEQUAL, "UGRO_CHECKPOINT_DIR": str(kept)}
    finished(ranks.start([*HF, *words, "--save-steps", "2"], tmp_path / "first", RANKS, before))
    after = {"UGRO_BALANCE": "static", "UGRO_SPEEDS": "1,0.4", "UGRO_RESUME_DIR": str(kept / "checkpoint-2")}
    results = finished(ranks.start([*HF, *words], tmp_path / "again", 2, after))
    expect_weights([one[0] for one in results], undisturbed["smaller"], error=SINGLE)


def test_a_trainer_that_is_told_to_end_saves_and_resumes_by_itself(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    words = DISTURBED["told"]
    first, kept = tmp_path / "first", tmp_path / "kept"
    started = ranks.start([*HF, *words, "--pause", "0.05"], first, RANKS, {**UNEQUAL, "UGRO_CHECKPOINT_DIR": str(kept)})
    try:
        wait_until(lambda: len(updates(first)) > 2, LIMIT_S, "the first steps")
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.wait(LIMIT_S) == [128 + signal.SIGTERM] * RANKS, started.logs()
    finally:
        started.end()
    (saved,) = kept.iterdir()
    again = ranks.start([*HF, *words], tmp_path / "again", RANKS, {**UNEQUAL, "UGRO_RESUME_DIR": str(saved)})
    expect_weights([one[0] for one in finished(again)], undisturbed["told"], error=SINGLE)
    steps = int(saved.name.split("-")[1])
    assert sorted(updates(first)) == list(range(steps))
    expect_every_sample_once(updates(first) | updates(tmp_path / "again"), -(-SAMPLES // WHOLE))


# --- Accelerate and Lightning -----------------------------------------------------------------------------------


def seen(*folders: Path) -> Counter[str]:
    """How often each sample was used in each epoch."""
    paths = [path for folder in folders for path in folder.glob("result_*.seen")]
    return Counter(line for path in paths for line in path.read_text().splitlines())


EVERYTHING_ONCE = Counter(f"{epoch} {index}" for epoch in range(EPOCHS) for index in range(SAMPLES))


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("accelerate", []),
        ("accelerate", ["--accumulate", "2"]),
        ("accelerate", ["--accumulate", "3", "--workers", "2"]),
        ("lightning", []),
        ("lightning", ["--accumulate", "2"]),
        ("lightning", ["--manual", "--workers", "2"]),
    ],
)
def test_a_library_on_unequal_ranks_trains_as_in_one_process(tmp_path: Path, library: str, words: list[str]) -> None:
    argv = [*OTHERS[library], *words]
    reference = alone([*argv, "--batch", str(WHOLE)], tmp_path / "alone")
    results = finished(ranks.start(argv, tmp_path / "three", RANKS, UNEQUAL))
    expect_weights(results, reference)
    assert seen(tmp_path / "three") == EVERYTHING_ONCE
    if library == "accelerate":
        assert [result["evaluated"] for result in results] == [pytest.approx(reference["evaluated"])] * RANKS
    (plan,) = ranks.metrics(tmp_path / "three/output/metrics.jsonl", "plan")
    assert plan["shares"][0] > plan["shares"][1] > plan["shares"][2]


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
@pytest.mark.parametrize("count", [3, 2])
def test_a_library_that_left_goes_on_in_its_epoch_with_other_shares_and_ranks(
    tmp_path: Path, library: str, count: int
) -> None:
    argv = [*OTHERS[library], "--shuffle", "--accumulate", "2"]
    undisturbed = finished(ranks.start(argv, tmp_path / "undisturbed", RANKS, UNEQUAL))
    first, kept = tmp_path / "first", tmp_path / "kept"
    left = ranks.start([*argv, "--leave-after", "4"], first, RANKS, {**UNEQUAL, "UGRO_CHECKPOINT_DIR": str(kept)})
    assert left.wait(LIMIT_S) == [0] * RANKS, left.logs()
    after = {"UGRO_BALANCE": "static", "UGRO_SPEEDS": ",".join(["1", "0.8", "0.1"][:count])}
    again = ranks.start(argv, tmp_path / "again", count, {**after, "UGRO_RESUME_DIR": resume_folder(kept)})
    expect_weights(finished(again), undisturbed[0])
    assert seen(first, tmp_path / "again") == EVERYTHING_ONCE


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_a_library_that_is_told_to_end_saves_first(tmp_path: Path, library: str) -> None:
    argv = [*OTHERS[library], "--shuffle"]
    undisturbed = finished(ranks.start(argv, tmp_path / "undisturbed", RANKS, UNEQUAL))
    first, kept = tmp_path / "first", tmp_path / "kept"
    variables = {**UNEQUAL, "UGRO_CHECKPOINT_DIR": str(kept)}
    started = ranks.start([*argv, "--pause", "0.05"], first, RANKS, variables)
    try:
        wait_until(lambda: seen(first).total() > 2 * WHOLE, LIMIT_S, "the first steps")
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.wait(LIMIT_S) == [128 + signal.SIGTERM] * RANKS, started.logs()
    finally:
        started.end()
    again = ranks.start(argv, tmp_path / "again", RANKS, {**UNEQUAL, "UGRO_RESUME_DIR": resume_folder(kept)})
    expect_weights(finished(again), undisturbed[0])
    assert seen(first, tmp_path / "again") == EVERYTHING_ONCE


def resume_folder(kept: Path) -> str:
    """As the agent would make it: the content of a folder, or a folder with the file."""
    (saved,) = kept.iterdir()
    if saved.is_dir():
        return str(saved)
    folder = kept.with_name("resume")
    folder.mkdir()
    os.link(saved, folder / saved.name)
    return str(folder)


# --- balance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["trainer", "accelerate", "lightning"])
def test_shares_follow_the_speeds_of_the_ranks(tmp_path: Path, library: str) -> None:
    """The second rank takes twice as long for a sample as the first one, the third one three times."""
    argv = [*OTHERS.get(library, HF), "--epochs", "4", "--pause", "0.02", "--batch", "5"]
    finished(ranks.start(argv, tmp_path, RANKS, {"UGRO_BALANCE": "adaptive"}))
    plans = ranks.metrics(tmp_path / "output/metrics.jsonl", "plan")
    assert plans[0]["shares"] == [5, 5, 5]
    assert len(plans) > 1, "equal shares were kept"
    shares = plans[-1]["shares"]
    assert shares[0] > shares[1] > shares[2]
    profile = ranks.metrics(tmp_path / "output/metrics.jsonl", "profile")
    assert profile[-2]["imbalance"] < profile[2]["imbalance"]
