"""Real ranks that are killed and stopped: the others go on, and the training is the one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks
from tests.rig.waiting import wait_until

SCRIPT = ["-m", "tests.rig.elastic"]
SAMPLES, EPOCHS, STEPS = 163, 2, 9
LIMIT_S = 150
HANGS_S = 5.0

pytestmark = [pytest.mark.timeout(400), pytest.mark.proof]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights after a training by one rank, which nothing happens to."""
    return _flat(ranks.start(SCRIPT, tmp_path_factory.mktemp("alone"), 1).results()[0]["weights"])


@pytest.mark.parametrize("how", [[], ["--workers", "2"], ["--gathers", "--checkpoints"]], ids=" ".join)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_is_killed_and_the_others_go_on(
    tmp_path: Path, undisturbed: list[float], how: list[str], lost: int
) -> None:
    started = _start(tmp_path, *how, "--lose", f"{lost}:4:KILL")
    try:
        _expect_codes(started, lost, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1, 2} - {lost}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
            assert (result["ranks"], result["step"], result["lr"]) == (2, EPOCHS * STEPS, 0.02 / 4)
        assert _used(tmp_path) == _everything_once()
        [change] = _changes(tmp_path)
        assert change["lost"] == [f"rank {lost} (node{lost})"]
        assert change["seconds"] < 2
    finally:
        started.end()


def test_a_block_is_done_again_with_the_samples_of_the_step_that_was_interrupted(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    started = _start(tmp_path, "--block", "--lose", "1:6:KILL")
    try:
        _expect_codes(started, 1, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 2}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


@pytest.fixture(scope="module")
def undisturbed_late(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    alone = ranks.start([*SCRIPT, "--late"], tmp_path_factory.mktemp("alone"), 1)
    return _flat(alone.results()[0]["weights"])


@pytest.mark.parametrize("how", [[], ["--block"]], ids=" ".join)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_step_counts_only_when_the_gradients_are_on_the_devices_of_all_ranks(
    tmp_path: Path, undisturbed_late: list[float], how: list[str], lost: int
) -> None:
    """As with NCCL: all hosts have queued the exchange and the optimizer's work when a rank is killed."""
    started = _start(tmp_path, "--late", *how, "--lose", f"{lost}:4:LATE")
    try:
        _expect_codes(started, lost, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1, 2} - {lost}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed_late, rel=1e-9, abs=1e-12)
            assert (result["ranks"], result["step"]) == (2, EPOCHS * STEPS)
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


def test_a_rank_that_does_not_count_a_step_that_others_have_counted_takes_its_outcome_from_them(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """As if a rank had been lost after the others had heard it, and before this one had."""
    started = _start(tmp_path, "--block", "--lose", "1:4:TOUCH")
    try:
        assert started.ranks.wait(LIMIT_S) == [0, 0, 0], started.ranks.logs()
        for result in _results(tmp_path, {0, 1, 2}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
            assert result["ranks"] == 3
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


def test_a_block_in_which_an_optimizer_has_run_is_not_done_again(tmp_path: Path, undisturbed: list[float]) -> None:
    started = _start(tmp_path, "--block", "--lose", "1:4:LATER")
    try:
        codes = started.ranks.wait(LIMIT_S)
        assert (codes[0], codes[2]) == (0, 0), started.ranks.logs()
        assert codes[1] != 0
        assert "an optimizer had run already" in started.ranks.logs()
        for result in _results(tmp_path, {0, 2}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
    finally:
        started.end()


def test_with_such_a_group_a_training_that_nobody_disturbs_is_right(
    tmp_path: Path, undisturbed_late: list[float]
) -> None:
    started = _start(tmp_path, "--late")
    try:
        assert started.ranks.wait(LIMIT_S) == [0, 0, 0], started.ranks.logs()
        for result in _results(tmp_path, {0, 1, 2}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed_late, rel=1e-9, abs=1e-12)
    finally:
        started.end()


def test_memory_that_runs_out_in_a_step_does_not_end_an_elastic_training(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """Also in the step in which another rank is lost."""
    lose = ("1:2:FORWARD", "0:3:BACKWARD", "1:5:BACKWARD", "2:5:KILL")
    started = _start(tmp_path, *(word for one in lose for word in ("--lose", one)))
    try:
        _expect_codes(started, 2, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
    finally:
        started.end()


def test_a_rank_lost_between_a_step_and_its_optimizer_loses_no_update(tmp_path: Path, undisturbed: list[float]) -> None:
    started = _start(tmp_path, "--looks", "--lose", "2:4:LOOK")
    try:
        _expect_codes(started, 2, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
    finally:
        started.end()


def test_a_rank_lost_between_a_batch_and_its_step_loses_no_samples(tmp_path: Path, undisturbed: list[float]) -> None:
    started = _start(tmp_path, "--asks", "--lose", "2:4:ASK")
    try:
        _expect_codes(started, 2, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


def test_a_block_whose_batch_is_of_ranks_that_are_lost_is_an_error(tmp_path: Path) -> None:
    """It cannot get another one."""
    started = _start(tmp_path, "--asks", "--block", "--lose", "2:4:ASK")
    try:
        assert 0 not in started.ranks.wait(LIMIT_S)
        for rank in (0, 1):
            assert "lost between a batch and its step" in (tmp_path / f"rank_{rank}.log").read_text()
    finally:
        started.end()


def test_ranks_are_lost_one_after_the_other_until_one_is_left(tmp_path: Path, undisturbed: list[float]) -> None:
    started = _start(tmp_path, "--lose", "0:3:KILL", "--lose", "2:11:KILL")
    try:
        codes = started.ranks.wait(LIMIT_S)
        assert codes == [-signal.SIGKILL, 0, -signal.SIGKILL], started.ranks.logs()
        [result] = _results(tmp_path, {1})
        assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


def test_a_rank_that_hangs_is_left_behind_and_ends_when_it_wakes(tmp_path: Path, undisturbed: list[float]) -> None:
    started = _start(tmp_path, "--lose", "2:4:STOP", UGRO_RANK_TIMEOUT_S=str(HANGS_S))
    try:
        others = started.ranks.processes[:2]
        wait_until(lambda: all(one.poll() is not None for one in others), LIMIT_S)
        assert [one.returncode for one in others] == [0, 0], started.ranks.logs()
        for result in _results(tmp_path, {0, 1}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
        [change] = _changes(tmp_path)
        assert change["seconds"] < 2  # of noticing, which takes the timeout
        started.ranks.processes[2].send_signal(signal.SIGCONT)
        assert started.ranks.processes[2].wait(LIMIT_S) != 0
        assert "have gone on without rank 2" in started.ranks.logs()
    finally:
        started.end()


@pytest.mark.parametrize(("lost", "how"), [(0, ""), (2, ""), (2, "--scaler"), (1, "--scaler --block")])
def test_a_rank_that_is_started_again_joins_with_the_state_of_the_others(
    tmp_path: Path, undisturbed: list[float], lost: int, how: str
) -> None:
    started = _start(tmp_path, "--lose", f"{lost}:3:KILL", "--epochs", "60", "--pause", "0.002", *how.split())
    try:
        started.ranks.processes[lost].wait(LIMIT_S)
        started.start_again(lost)
        assert started.ranks.wait(LIMIT_S) == [0, 0, 0], started.ranks.logs()
        results = _results(tmp_path, {0, 1, 2})
        first = _flat(results[0]["weights"])
        for result in results:
            assert _flat(result["weights"]) == pytest.approx(first, rel=1e-12)
            assert (result["ranks"], result["step"], result["lr"]) == (3, 60 * STEPS, results[0]["lr"])
            assert result["scale"] == results[0]["scale"], "losses are scaled alike on all ranks"
        assert _used(tmp_path) == _everything_once(60)
        told = [change["joined"] for change in _changes(tmp_path)]
        assert [f"rank {lost} (node{lost})"] in told
    finally:
        started.end()


def test_a_state_that_takes_long_to_pack_and_to_take_over_is_waited_for_and_said(tmp_path: Path) -> None:
    """Longer than the others wait for a rank that is silent."""
    started = _start(
        tmp_path, "--lose", "2:3:KILL", "--epochs", "60", "--pause", "0.002", "--large", "24", "12",
        UGRO_RANK_TIMEOUT_S="8",
    )  # fmt: skip
    try:
        started.ranks.processes[2].wait(LIMIT_S)
        started.start_again(2)
        assert started.ranks.wait(LIMIT_S) == [0, 0, 0], started.ranks.logs()
        results = _results(tmp_path, {0, 1, 2})
        assert [result["ranks"] for result in results] == [3, 3, 3]
        assert _flat(results[2]["weights"]) == pytest.approx(_flat(results[0]["weights"]), rel=1e-12)
        assert _used(tmp_path) == _everything_once(60)
        told = [change["joined"] for change in _changes(tmp_path)]
        assert told.count(["rank 2 (node2)"]) == 1
        for rank in range(3):
            log = (tmp_path / f"rank_{rank}.log").read_text()
            assert "rank 0 packs its state" in log
            assert "rank 2 takes over the state" in log
    finally:
        started.end()


@pytest.mark.parametrize("lose", ["2:5:THAW", "2:6:KILL"])
def test_a_rank_is_lost_when_a_layer_thaws(tmp_path: Path, lose: str) -> None:
    alone = ranks.start([*SCRIPT, "--thaws", "5"], tmp_path / "alone", 1).results()[0]
    started = _start(tmp_path, "--thaws", "5", "--lose", lose)
    try:
        _expect_codes(started, 2, -signal.SIGKILL)
        for result in _results(tmp_path, {0, 1}):
            assert _flat(result["weights"]) == pytest.approx(_flat(alone["weights"]), rel=1e-9, abs=1e-12)
        assert _used(tmp_path) == _everything_once()
    finally:
        started.end()


def test_a_rank_that_joins_trains_the_layers_that_have_thawed_before(tmp_path: Path) -> None:
    """Its script begins anew, and comes to none of the places where they thaw."""
    how = ["--thaws", "5", "--epochs", "60"]
    alone = ranks.start([*SCRIPT, *how], tmp_path / "alone", 1).results()[0]
    started = _start(tmp_path, *how, "--pause", "0.002", "--lose", "2:8:KILL")
    try:
        started.ranks.processes[2].wait(LIMIT_S)
        started.start_again(2)
        assert started.ranks.wait(LIMIT_S) == [0, 0, 0], started.ranks.logs()
        for result in _results(tmp_path, {0, 1, 2}):
            assert _flat(result["weights"]) == pytest.approx(_flat(alone["weights"]), rel=1e-9, abs=1e-12)
            assert (result["ranks"], result["step"]) == (3, 60 * STEPS)
        told = [change["joined"] for change in _changes(tmp_path)]
        assert told.count(["rank 2 (node2)"]) == 1
    finally:
        started.end()


def test_with_fewer_ranks_than_it_needs_the_training_ends(tmp_path: Path) -> None:
    started = _start(tmp_path, "--lose", "1:4:KILL", UGRO_MIN_RANKS="3")
    try:
        codes = started.ranks.wait(LIMIT_S)
        assert codes[1] == -signal.SIGKILL
        assert 0 not in codes
        assert "fewer than the 3" in started.ranks.logs()
    finally:
        started.end()


def test_a_script_that_does_not_say_what_its_optimizer_is_ends_before_its_first_step(tmp_path: Path) -> None:
    """A rank that is a step behind could not take over what the others' optimizer remembers."""
    started = _start(tmp_path, "--forgets")
    try:
        assert 0 not in started.ranks.wait(LIMIT_S)
        assert "has to know its optimizer" in started.ranks.logs()
    finally:
        started.end()


def test_an_error_of_a_ranks_own_is_not_taken_for_a_lost_rank(tmp_path: Path) -> None:
    started = _start(tmp_path, "--lose", "1:4:TRAP")  # ends it, as a crash would
    try:
        codes = started.ranks.wait(LIMIT_S)
        assert codes == [0, -signal.SIGTRAP, 0], started.ranks.logs()
    finally:
        started.end()


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_killed_at_any_moment_leaves_a_training_that_nobody_disturbed(
    tmp_path: Path, undisturbed: list[float], seed: int
) -> None:
    drawn = random.Random(seed)
    lost, name = drawn.choice([0, 1, 2]), drawn.choice(["KILL", "KILL", "STOP"])
    how = drawn.choice([[], ["--block"], ["--workers", "1"], ["--gathers", "--checkpoints"]])
    started = _start(tmp_path, *how, "--pause", "0.01", UGRO_RANK_TIMEOUT_S=str(HANGS_S))
    try:
        moment = drawn.uniform(0, 2)
        wait_until(lambda: len(_lines(tmp_path, lost)) >= 1 + int(moment * 5), LIMIT_S)
        os.kill(started.ranks.processes[lost].pid, getattr(signal, f"SIG{name}"))
        others = [one for rank, one in enumerate(started.ranks.processes) if rank != lost]
        wait_until(lambda: all(one.poll() is not None for one in others), LIMIT_S)
        assert [one.returncode for one in others] == [0, 0], started.ranks.logs()
        for result in _results(tmp_path, {0, 1, 2} - {lost}):
            assert _flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
    finally:
        started.end()


# --- what they left ---------------------------------------------------------------------------------------------


def _start(folder: Path, *arguments: str, **variables: str) -> ranks.ElasticRanks:
    return ranks.start_elastic([*SCRIPT, *arguments], folder, 3, variables)


def _expect_codes(started: ranks.ElasticRanks, lost: int, code: int) -> None:
    expected = [code if rank == lost else 0 for rank in range(3)]
    assert started.ranks.wait(LIMIT_S) == expected, started.ranks.logs()


def _results(folder: Path, numbers: set[int]) -> list[Any]:
    return [json.loads((folder / f"result_{number}.json").read_text()) for number in sorted(numbers)]


def _flat(weights: Any) -> list[float]:
    return [one for part in weights for one in _flat(part)] if isinstance(weights, list) else [weights]


def _lines(folder: Path, rank: int) -> list[Any]:
    path = folder / f"result_{rank}.seen"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _used(folder: Path) -> Counter[tuple[int, int]]:
    lines = [line for rank in range(3) for line in _lines(folder, rank)]
    return Counter((epoch, index) for epoch, _, indices, _ in lines for index in indices)


def _everything_once(epochs: int = EPOCHS) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(epochs) for index in range(SAMPLES))


def _changes(folder: Path) -> list[Any]:
    files = sorted((folder / "output").glob("metrics*.jsonl"))
    return [record for path in files for record in ranks.metrics(path, "members")]
