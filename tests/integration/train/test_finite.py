"""Real ranks of which one has a loss or gradients that are not finite: the run ends, leaves them out, or says so."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks
from tests.rig.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch"),
]
# In one start: importing torch takes longer than all that is tested with it.
STOPPED = {"stop_loss": "loss", "stop_gradients": "gradients", "stop_whole_step": "loss"}
SKIPPED = ("skip_loss", "skip_gradients", "skip_own_backward", "skip_whole_step", "skip_sharded")
LOSSY = ("skip_compressed", "skip_by_hook", "stop_compressed")
ALONE = ("skip_loss", "skip_own_backward", "stop_own_backward")
ROUNDS = ("rounds_skip", "rounds_skip_own_backward", "rounds_ignore")
APART = {
    "batch_left_out": "step 3, rank 1 in step 4, rank 2 in step 3",
    "loop_left": "step 3 of epoch 0, rank 1 in step 3 of epoch 1",
}
OTHERS = (
    "stop_pipeline", "ignore", "loss_alone", "skip_batch_norm", "scaler", "scaler_of_its_own", "scaler_and_a_loss",
    "rounds_stop",
)  # fmt: skip
RANKS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finite")
    names = [*STOPPED, *SKIPPED, *LOSSY, *ROUNDS, *OTHERS, *APART]
    started = ranks.start(["-m", "tests.rig.finite", *names], folder, RANKS)
    started.wait(350)
    return list(started.results())


@pytest.mark.parametrize("scenario", STOPPED)
def test_all_ranks_end_with_an_error_that_names_the_step_and_the_rank(
    results: list[dict[str, Any]], scenario: str
) -> None:
    what = STOPPED[scenario]
    for result in results:
        error = result[scenario]["error"]
        assert error.startswith(f"NotFinite: the {what} of rank 1 (")
        assert error.endswith(f" {'is' if what == 'loss' else 'are'} not finite in step 3")


def test_the_stage_of_a_pipeline_that_has_the_loss_is_named_with_its_node(results: list[dict[str, Any]]) -> None:
    pattern = r"NotFinite: the loss of rank (\d) \(node\1\) is not finite in step 3"
    errors = {result["stop_pipeline"]["error"] for result in results}
    assert len(errors) == 1
    assert re.fullmatch(pattern, *errors)


@pytest.mark.parametrize("scenario", SKIPPED)
def test_an_update_that_is_left_out_is_left_out_on_all_ranks(results: list[dict[str, Any]], scenario: str) -> None:
    """The weights are those of one process that does not make this update, with the moments of its optimizer."""
    from tests.rig.finite import SCENARIOS, alone

    expected = alone(SCENARIOS[scenario], [result[scenario]["steps"] for result in results])
    for result in results:
        found = result[scenario]
        assert found["error"] == ""
        assert found["weights"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        who = "every rank" if scenario == "skip_sharded" else "rank 1 ("
        assert [text for text in found["said"] if who in text and text.endswith("the update was left out")]


def test_gradients_that_are_too_large_for_half_precision_are_not_finite(results: list[dict[str, Any]]) -> None:
    for result in results:
        for scenario in ("skip_compressed", "skip_by_hook"):
            found = result[scenario]
            assert found["error"] == ""
            assert all(map(math.isfinite, found["weights"])), scenario
            expected = "the gradients of every rank were not finite in step 3; the update was left out"
            assert found["said"] == [expected], scenario
        assert result["stop_compressed"]["error"].endswith("the gradients of every rank are not finite in step 3")


def test_one_process_notices_it_too_also_if_the_script_calls_backward(tmp_path: Path) -> None:
    from tests.rig.finite import SCENARIOS, alone

    [result] = ranks.start(["-m", "tests.rig.finite", *ALONE], tmp_path, 1).results()
    for scenario in ALONE[:2]:
        found = result[scenario]
        assert found["error"] == ""
        assert found["weights"] == pytest.approx(alone(SCENARIOS[scenario], [found["steps"]]), rel=1e-9, abs=1e-12)
        assert [text for text in found["said"] if text.endswith("the update was left out")]
    assert result["stop_own_backward"]["error"].endswith("is not finite in step 3")


def test_what_a_layer_has_learnt_in_a_step_that_is_left_out_is_forgotten(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["skip_batch_norm"]
        assert any(text.endswith("the update was left out") for text in found["said"])
        assert found["buffers"]
        assert all(map(math.isfinite, [*found["buffers"], *found["weights"]]))


def test_what_is_ignored_is_said(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["ignore"]
        assert found["error"] == ""
        assert all(map(math.isnan, found["weights"]))
        assert any("not finite in step 3" in text for text in found["said"])


@pytest.mark.parametrize("scenario", ["scaler", "scaler_of_its_own"])
def test_a_grad_scaler_looks_for_its_scale_in_peace(results: list[dict[str, Any]], scenario: str) -> None:
    for result in results:
        found = result[scenario]
        assert (found["error"], found["said"]) == ("", [])
        assert found["scale"] == 4.0, "it took a smaller one"


def test_a_loss_that_is_not_finite_ends_nothing_if_its_gradients_are(results: list[dict[str, Any]]) -> None:
    """As the mean over no labels is: nothing of it comes into the model."""
    for result in results:
        found = result["loss_alone"]
        assert found["error"] == ""
        assert all(map(math.isfinite, found["weights"]))
        assert any(text.endswith("not finite in step 3") for text in found["said"])


def test_a_loss_that_is_not_finite_is_said_also_with_a_grad_scaler(results: list[dict[str, Any]]) -> None:
    """It leaves out the update by itself."""
    for result in results:
        found = result["scaler_and_a_loss"]
        assert found["error"] == ""
        assert all(map(math.isfinite, found["weights"]))
        assert any("the loss of rank 1" in text for text in found["said"])


@pytest.mark.parametrize("scenario", ROUNDS)
def test_a_round_of_local_sgd_is_averaged_over_the_ranks_whose_numbers_are_finite(
    results: list[dict[str, Any]], scenario: str
) -> None:
    """The weights are those of one process that averages without this rank's change in that round."""
    from tests.rig.finite import SCENARIOS, alone

    expected = alone(SCENARIOS[scenario], [result[scenario]["steps"] for result in results])
    for result in results:
        assert result[scenario]["error"] == ""
        assert result[scenario]["weights"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert any("of rank 1" in text for text in results[1][scenario]["said"])


def test_a_run_of_local_sgd_that_is_to_stop_ends_after_the_round(results: list[dict[str, Any]]) -> None:
    for result in results:
        error = result["rounds_stop"]["error"]
        assert error.startswith("NotFinite: the loss of rank 1 (")


@pytest.mark.parametrize("scenario", APART)
def test_ranks_that_are_not_in_the_same_step_are_told_so(results: list[dict[str, Any]], scenario: str) -> None:
    for result in results:
        error = result[scenario]["error"]
        assert error.startswith(f"ApartError: the ranks are not in the same step: rank 0 in {APART[scenario]}")


def test_a_rank_that_left_its_loop_says_for_whom_it_waits(tmp_path: Path) -> None:
    """The others are in the middle of a step, and will never be there."""
    variables = {"UGRO_RANK_TIMEOUT_S": "1", "UGRO_RUN_DIR": str(tmp_path), "UGRO_JOB": "7"}
    started = ranks.start(["-m", "tests.rig.finite", "loop_left_for_good"], tmp_path, 2, variables)
    said = tmp_path / "notices" / "1.json"
    try:
        wait_until(lambda: said.exists(), timeout_s=100, what="a word of the rank that waits")
    finally:
        started.end()
    found = json.loads(said.read_text())
    assert found["run"] == "7.1"
    [text] = found["notices"]
    assert text.startswith("rank 1 (")
    assert " has waited 1.00 s for rank 0 (" in text
    assert "after 3 steps" in text
    assert text in started.logs()
