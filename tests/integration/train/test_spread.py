"""Real ranks that share one model: FSDP and tensor parallel. The update is that of one process, checkpoints fit all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks, resuming

EXACT = (
    "fsdp", "fsdp_unequal", "fsdp_of_a_plain_model", "fsdp_blocks", "fsdp_other_beginnings", "fsdp_micro_batches",
    "fsdp_out_of_memory", "fsdp_out_of_memory_in_backward",
)  # fmt: skip
TENSOR = ("tp_dp", "tp_dp_unequal")
EPOCHS = ["-m", "tests.rig.epochs"]
STEPS = 18
LIMIT_S = 150

pytestmark = pytest.mark.timeout(400)


def of_pairs(rank: int) -> dict[str, str]:
    """Two ranks on each node."""
    return {"UGRO_NODE": f"node{rank // 2}", "LOCAL_RANK": str(rank % 2)}


def results_of(folder: Path, scenarios: tuple[str, ...], count: int, **options: Any) -> list[dict[str, Any]]:
    started = ranks.start(["-m", "tests.rig.spread", *scenarios], folder, count, **options)
    started.wait(350)
    return list(started.results())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(tmp_path_factory.mktemp("sharded"), (*EXACT, "fsdp_balanced", "fsdp_bf16", "fsdp_as_on_a_gpu"), 3)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    scenarios = (*TENSOR, "tp_dp_of_transformers")
    return results_of(tmp_path_factory.mktemp("split"), scenarios, 4, of_rank=of_pairs)


# --- FSDP -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("scenario", EXACT)
def test_the_gradient_is_that_of_the_whole_batch(sharded: list[dict[str, Any]], scenario: str) -> None:
    assert max(result[scenario]["error"] for result in sharded) < 1e-12
    assert all(result[scenario]["seen_once"] for result in sharded)


@pytest.mark.proof
def test_a_rank_keeps_its_part_of_the_model_only(sharded: list[dict[str, Any]]) -> None:
    parts = [result["fsdp"]["held_part"] for result in sharded]
    assert sum(parts) == pytest.approx(1)
    assert max(parts) < 0.5


@pytest.mark.proof
def test_waiting_inside_a_step_is_not_a_ranks_own_time_so_faster_ranks_get_more(sharded: list[dict[str, Any]]) -> None:
    # A sample takes the second rank twice, and the third three times as long as the first.
    for result in sharded:
        assert result["fsdp_balanced"]["is_clean"]
        first, _, third = result["fsdp_balanced"]["plan"]
        assert first >= 2 * third


@pytest.mark.proof
def test_the_places_where_a_gpu_would_wait_are_there(sharded: list[dict[str, Any]]) -> None:
    for result in sharded:
        assert result["fsdp_as_on_a_gpu"]["is_possible"]
        assert result["fsdp_as_on_a_gpu"]["waits"] > 10


@pytest.mark.proof
@pytest.mark.parametrize("scenario", ["fsdp", "fsdp_unequal", "fsdp_bf16"])
def test_clipping_uses_the_norm_of_all_gradients(sharded: list[dict[str, Any]], scenario: str) -> None:
    for result in sharded:
        assert result[scenario]["norms"] == pytest.approx(result[scenario]["expected_norms"], rel=1e-6)


@pytest.mark.proof
def test_with_half_precision_it_is_as_near_as_that_allows(sharded: list[dict[str, Any]]) -> None:
    assert 1e-6 < max(result["fsdp_bf16"]["error"] for result in sharded) < 0.05


@pytest.mark.proof
@pytest.mark.parametrize("scenario", ["fsdp_out_of_memory", "fsdp_out_of_memory_in_backward"])
def test_a_device_that_ran_out_of_memory_keeps_training_with_less(sharded: list[dict[str, Any]], scenario: str) -> None:
    small = sharded[1][scenario]
    assert 1 <= small["failures"] <= 3
    assert small["caps"][1] <= 4
    assert [result[scenario]["failures"] for result in (sharded[0], sharded[2])] == [0, 0]


# --- tensor parallel ----------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("scenario", TENSOR)
def test_nodes_that_split_layers_compute_the_gradient_of_the_whole_batch(
    split: list[dict[str, Any]], scenario: str
) -> None:
    for result in split:
        assert result[scenario]["error"] < 1e-12
        assert result[scenario]["norms"] == pytest.approx(result[scenario]["expected_norms"], rel=1e-6)


@pytest.mark.proof
def test_ranks_of_a_node_have_the_same_samples_and_nodes_share_the_batch(split: list[dict[str, Any]]) -> None:
    for result in split:
        assert [len(result[scenario]["plan"]) for scenario in TENSOR] == [2, 2]
    first = split[0]["tp_dp_unequal"]["shares"][0]
    assert first == [14, 14, 7, 7]


@pytest.mark.proof
def test_a_model_of_transformers_brings_its_plan(split: list[dict[str, Any]]) -> None:
    for result in split:
        assert result["tp_dp_of_transformers"]["error"] < 1e-12
        assert result["tp_dp_of_transformers"]["split"] == 2 * 7 + 1  # seven layers in each block, and the head


@pytest.mark.proof
def test_nodes_with_one_rank_each_cannot_split_layers(tmp_path: Path) -> None:
    started = ranks.start(["-m", "tests.rig.spread", "tp_dp"], tmp_path, 2)
    assert started.wait(LIMIT_S) == [1, 1]
    assert "tensor parallel needs several ranks on a node" in started.logs()


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights after a training by one process."""
    folder = tmp_path_factory.mktemp("alone")
    env = {name: value for name, value in os.environ.items() if not name.startswith("UGRO_")}
    env |= {"RESULT": str(folder / "result_0.json"), "PYTHONPATH": str(ranks.ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *EPOCHS], env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return resuming.flat(json.loads((folder / "result_0.json").read_text())["weights"])


def apart(folder: Path) -> Callable[[int], Mapping[str, str]]:
    """Nodes that see nothing of each other's files."""
    return lambda rank: {"UGRO_CHECKPOINT_DIR": str(folder / f"of_node{rank}")}


@pytest.mark.proof
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_checkpoint_of_three_ranks_resumes_on_two_and_then_on_one(
    tmp_path: Path, undisturbed: list[float], is_apart: bool
) -> None:
    script = [*EPOCHS, "--parallel", "fsdp"]
    resume: dict[str, str] = {}
    for count, leave in ((3, 5), (2, 11), (1, -1)):
        folder = tmp_path / str(count)
        places = apart(folder) if is_apart else lambda rank: {}
        started = ranks.start([*script, "--leave-after", str(leave)], folder, count, resume, places)
        assert started.wait(LIMIT_S) == [0] * count, started.logs()
        kept = folder / ("of_node0" if is_apart else "output/checkpoints")
        _expect_complete(kept, f"step_{leave if leave > 0 else STEPS:09}", count)
        if is_apart and count > 1:
            assert not list((folder / "of_node1").iterdir()), "what was sent does not stay"
        resume = {"UGRO_RESUME_DIR": str(kept)}
    result = json.loads((tmp_path / "1" / "result_0.json").read_text())
    assert resuming.flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9)
    assert resuming.seen(tmp_path) == resuming.everything_once()


@pytest.mark.proof
def test_a_run_that_is_told_to_end_saves_its_parts_first(tmp_path: Path, undisturbed: list[float]) -> None:
    first = tmp_path / "first"
    script = [*EPOCHS, "--parallel", "fsdp"]
    resuming.tell_to_end(ranks.start([*script, "--pause", "0.004"], first, 2, of_rank=apart(first)), whom=[1, 0])
    weights = resuming.resumed(script, tmp_path / "again", 2, {"UGRO_RESUME_DIR": str(first / "of_node0")})
    assert weights == [pytest.approx(undisturbed, rel=1e-9)] * 2


@pytest.mark.proof
def test_a_checkpoint_of_a_split_model_resumes_sharded_and_in_ddp(tmp_path: Path, undisturbed: list[float]) -> None:
    resume: dict[str, str] = {}
    for parallel, count, leave in (("tp+dp", 4, 5), ("fsdp", 3, 11), ("ddp", 2, -1)):
        folder = tmp_path / parallel
        script = [*EPOCHS, "--parallel", parallel, "--leave-after", str(leave)]
        started = ranks.start(script, folder, count, resume, of_pairs if parallel == "tp+dp" else lambda rank: {})
        assert started.wait(LIMIT_S) == [0] * count, started.logs()
        resume = resuming.resuming(folder)
    for rank in range(2):
        result = json.loads((tmp_path / "ddp" / f"result_{rank}.json").read_text())
        assert resuming.flat(result["weights"]) == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.proof
def test_a_checkpoint_of_complete_models_is_refused_by_ranks_that_share_one(tmp_path: Path) -> None:
    first = tmp_path / "first"
    assert ranks.start([*EPOCHS, "--leave-after", "2"], first, 1).wait(LIMIT_S) == [0]
    variables = resuming.resuming(first)
    again = ranks.start([*EPOCHS, "--parallel", "fsdp"], tmp_path / "again", 2, variables)
    assert again.wait(LIMIT_S) == [1, 1]
    assert "written by a training whose ranks had complete models" in again.logs()


@pytest.mark.proof
def test_no_thread_of_pytorchs_outlives_the_interpreter(tmp_path: Path) -> None:
    """Such a thread aborts a rank that has done all it was to do, now and then."""
    text = """
import torch, ugro.train as ut
run = ut.init()
model = run.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), parallel="fsdp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in run.loader(torch.utils.data.TensorDataset(torch.randn(32, 2)), global_batch=8):
    with run.step() as step:
        step.backward(step.loss(model(batch[0]).square().mean()))
        optimizer.step()
        optimizer.zero_grad()
"""
    for names in ranks.threads_at_exit(text, tmp_path, 2):
        assert [name for name in names if "gloo" in name] == []


# --- the example --------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize(("parallel", "count"), [("fsdp", 2), ("tp+dp", 4), ("fsdp", 1)])
def test_the_example_trains_a_model_that_ranks_share(tmp_path: Path, parallel: str, count: int) -> None:
    script = [str(ranks.ROOT / "examples" / "train_gpt.py"), "--tiny", "--parallel", parallel]
    started = ranks.start(script, tmp_path, count, of_rank=of_pairs if count == 4 else lambda rank: {})
    assert started.wait(LIMIT_S) == [0] * count, started.logs()
    records = tmp_path / "output" / "metrics.jsonl"
    losses = [record["values"]["loss"] for record in ranks.metrics(records, "log")]
    assert sum(losses[-4:]) < sum(losses[:4])
    [model] = ranks.metrics(records, "model")
    assert model["parallel"] == parallel
    assert 0 < model["block_bytes"] < model["parameter_bytes"]


def _expect_complete(folder: Path, name: str, count: int) -> None:
    """One folder that is a whole checkpoint, and nothing unfinished."""
    assert sorted(path.name for path in folder.iterdir())[-1] == name
    assert all(path.name.startswith("step_") for path in folder.iterdir())
    files = {path.name for path in (folder / name).iterdir()}
    assert {"run.pt", ".metadata"} < files
    assert len([one for one in files if one.endswith(".distcp")]) == count
