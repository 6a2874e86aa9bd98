"""Real ranks: their update is the one of a single process on the whole batch, however the batch is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks

# Everything of one kind in one start: importing torch takes longer than all that is tested with it.
EXACT = (
    "adaptive", "adaptive_with_workers", "static", "micro_batches", "own_no_sync", "synchronised_batch_norm",
    "out_of_memory", "out_of_memory_in_backward", "out_of_memory_everywhere", "weighted", "weighted_out_of_memory",
    "fully_sharded", "synchronised_batch_norm_of_gpus", "out_of_memory_with_unused_layers",
)  # fmt: skip
OTHERS = ("half_precision", "pipeline", "local_rounds")
RANKS = 3

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gradients")
    started = ranks.start(["-m", "tests.rig.gradients", *EXACT, *OTHERS], folder, RANKS)
    started.wait(350)
    return list(started.results())


@pytest.mark.parametrize("scenario", EXACT)
def test_the_gradient_is_that_of_the_whole_batch(results: list[dict[str, Any]], scenario: str) -> None:
    assert max(result[scenario]["error"] for result in results) < 1e-12


def test_with_half_precision_it_is_as_near_as_that_allows(results: list[dict[str, Any]]) -> None:
    assert max(result["half_precision"]["error"] for result in results) < 0.05
    # What is clipped after the exchange is clipped alike.
    assert all(result["half_precision"]["norms"] == results[0]["half_precision"]["norms"] for result in results)


@pytest.mark.parametrize("scenario", [*EXACT, "half_precision"])
def test_every_sample_is_used_once(results: list[dict[str, Any]], scenario: str) -> None:
    assert all(result[scenario]["seen_once"] for result in results)


def test_shares_are_unequal_and_change_while_it_runs(results: list[dict[str, Any]]) -> None:
    first, *_, last_whole, rest = results[0]["adaptive"]["shares"]
    assert first == [7, 7, 7]
    assert last_whole != first
    assert sum(rest) == 2
    assert 0 in rest
    assert results[0]["static"]["shares"][0] == [12, 6, 3]


@pytest.mark.parametrize("scenario", ["out_of_memory", "out_of_memory_in_backward"])
def test_a_device_that_ran_out_of_memory_keeps_training_with_less(results: list[dict[str, Any]], scenario: str) -> None:
    small = results[1][scenario]
    assert small["failures"] >= 1
    assert small["caps"][1] <= 4
    assert small["failures"] <= 3, "it was found out once, and then remembered"
    assert small["shares"][2][1] == small["caps"][1], "the others take the rest from the next plan on"


def test_when_no_device_can_hold_its_share_all_accumulate(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert sum(result["out_of_memory_everywhere"]["plan"]) == 21
        assert result["out_of_memory_everywhere"]["failures"] <= 3


def test_memory_may_run_out_anywhere_in_a_step_of_a_model_with_unused_layers(results: list[dict[str, Any]]) -> None:
    assert sum(result["out_of_memory_with_unused_layers"]["failures"] for result in results) >= 12


@pytest.mark.proof
@pytest.mark.parametrize("count", [2, 3])
def test_memory_may_run_out_anywhere_in_a_step(tmp_path: Path, count: int) -> None:
    names = [f"out_of_memory_{name}" for name in ("in_many_buckets", "with_static_graph", "with_unused_layers")]
    started = ranks.start(["-m", "tests.rig.gradients", *names], tmp_path, count)
    started.wait(350)
    for result in started.results():
        for name in names:
            assert result[name]["error"] < 1e-12, name
            assert result[name]["seen_once"], name
            assert result[name]["failures"] >= 4, name


def test_models_that_are_averaged_in_rounds_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    """The others of this kind are in ``test_local``."""
    for result in results:
        found = result["local_rounds"]
        assert found["error"] < 1e-9
        assert found["seen_once"], "ranks of unequal speed use every sample once in an epoch"
        assert found["step"] == 2 * 54, "steps count global batches, whatever each rank takes"
    main = results[0]["local_rounds"]
    assert main["lr_scale"] == pytest.approx(RANKS**0.5)
    assert main["profiles"]
    assert all(sum(one["shares"]) == one["samples"] == 12 and one["step_s"] > 0 for one in main["profiles"])
    assert main["progress"][-1]["total_steps"] == 2 * 54


def test_a_pipeline_trains_as_one_process_does(results: list[dict[str, Any]]) -> None:
    """Tied weights, a short last batch, a checkpoint that one process can load. The others are in ``test_pipeline``."""
    for result in results:
        found = result["pipeline"]
        assert found["error"] < 1e-12, found
        assert found["samples"] == 2 * 79, "every rank has every sample once in an epoch"
        assert 0 < found["own"] < 34, "but not every layer"
