"""Real ranks of a pipeline: losses and weights are those of one process, also after layers have moved.

The plainest one is tested in ``test_gradients``, with ranks that run already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks, resuming

SCRIPT = ["-m", "tests.rig.pipelines"]
TRAINING = ["-m", "tests.rig.epochs", "--parallel", "pipeline"]
LIMIT_S = 150
EXACT = 1e-12
CASES = [
    ("tied", 2), ("sequential", 3), ("interleaved", 2), ("interleaved", 3), ("steps_first", 2), ("thawing", 3),
]  # fmt: skip

pytestmark = pytest.mark.timeout(400)


def _results(folder: Path, count: int, *scenarios: str) -> list[dict[str, Any]]:
    started = ranks.start([*SCRIPT, *scenarios], folder, count)
    started.wait(LIMIT_S)
    return list(started.results())


@pytest.mark.proof
@pytest.mark.parametrize(("scenario", "count"), CASES)
def test_cut_in_any_way_it_trains_as_one_process_does(tmp_path: Path, scenario: str, count: int) -> None:
    results = _results(tmp_path, count, scenario)
    assert max(result[scenario]["error"] for result in results) < EXACT, results
    stages = results[0][scenario]["cuts"][0]
    assert len(stages) == count * (2 if scenario == "interleaved" else 1)


@pytest.mark.proof
def test_layers_leave_a_device_that_became_slow_and_the_training_stays_exact(tmp_path: Path) -> None:
    results = _results(tmp_path, 3, "moved")
    found = [result["moved"] for result in results]
    assert max(one["error"] for one in found) < EXACT, found
    records = [record for record in found[0]["records"] if record["kind"] == "pipeline"]
    planned = [record for record in records if record["what"] == "planned"]
    assert len(planned) >= 2, records
    assert _of_rank(planned[-1], 0) < _of_rank(planned[0], 0)
    assert planned[-1]["moved"] > 0
    assert "node0 takes" in planned[-1]["reason"]
    assert any(record["what"] == "measured" and record["measured_s"] > 0 for record in records)
    profiles = [record for record in found[0]["records"] if record["kind"] == "profile"]
    assert {record["samples"] for record in profiles} == {24, 7}
    assert all(len(record["own_s"]) == 3 and record["loss"] > 0 for record in profiles)


def _of_rank(record: dict[str, Any], rank: int) -> int:
    return sum(count for at, count in zip(record["ranks"], record["layers"], strict=True) if at == rank)


@pytest.mark.proof
def test_a_model_of_hugging_face_is_cut_with_two_functions(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = _results(tmp_path, 2, "hugging_face")
    assert max(result["hugging_face"]["error"] for result in results) < EXACT, results


@pytest.mark.proof
def test_mistakes_are_named_on_every_rank(tmp_path: Path) -> None:
    expected = {
        "no layers": "a pipeline needs the layers of the model (say how it is cut",
        "unknown layers": "the model has no 'layers'",
        "layers of another model": "not a ModuleList or Sequential with layers of this model",
        "unknown before": "before is not a method or module of the model",
        "layers too deep": "the layers are too deep inside the model",
        "incomplete": "before, layers and after do not compute what the model computes: other values",
        "unknown option": "has no option 'depth' (it has layers,",
        "no micro-batches": "micro_batches is not a positive number: 0",
        "a block": "a pipeline runs complete steps (loss = run.step(loss_fn, batch))",
        "no optimizer": "has to know their optimizer (call run.keep(",
        "too few layers": "3 layers cannot be cut into 4 stages for 2 ranks",
        "no call": "the loss function does not call the model",
        "no tensors": "the model of a pipeline takes tensors",
        "by name": "takes its inputs by position: numbers",
        "a dict": "blocks.0 returns dict, and stages exchange tensors",
    }
    for result in _results(tmp_path, 2, "nonsense"):
        said = result["nonsense"]
        assert said.keys() == expected.keys()
        assert {name: text for name, text in said.items() if expected[name] not in text} == {}


# --- whole trainings --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights after a training by one process."""
    started = ranks.start(["-m", "tests.rig.epochs"], tmp_path_factory.mktemp("alone"), 1)
    started.wait(LIMIT_S)
    return resuming.flat(started.results()[0]["weights"])


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_a_pipeline_resumes_in_the_middle_of_an_epoch_with_another_number_of_ranks(
    tmp_path: Path, undisturbed: list[float], before: int, after: int
) -> None:
    weights = resuming.resumed_elsewhere(TRAINING, tmp_path, before, after)
    assert weights == [pytest.approx(undisturbed, rel=1e-9)] * after
    assert resuming.seen(tmp_path) == resuming.everything_once()


@pytest.mark.proof
def test_a_pipeline_that_is_told_to_end_saves_first_and_goes_on_where_it_was(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    first = tmp_path / "first"
    resuming.tell_to_end(ranks.start([*TRAINING, "--pause", "0.004"], first, 2), whom=[1], noted_by=[0])
    assert len(list((first / "output" / "checkpoints").iterdir())) == 1
    weights = resuming.resumed(TRAINING, tmp_path / "again", 3, resuming.resuming(first))
    assert weights[0] == pytest.approx(undisturbed, rel=1e-9)
    assert resuming.seen(tmp_path) == resuming.everything_once()


@pytest.mark.proof
def test_no_thread_of_a_pipeline_outlives_the_interpreter(tmp_path: Path) -> None:
    text = """
import torch, ugro.train as ut
run = ut.init()
model = run.wrap(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4))), parallel="pipeline")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(optimizer=optimizer)
for batch in run.loader(torch.utils.data.TensorDataset(torch.randn(32, 2)), global_batch=8):
    run.step(lambda part: model(part[0]).square().mean(), batch)
    optimizer.step()
    optimizer.zero_grad()
"""
    for names in ranks.threads_at_exit(text, tmp_path, 2):
        assert [name for name in names if "gloo" in name] == []


@pytest.mark.proof
@pytest.mark.parametrize("count", [1, 3])
def test_the_example_learns(tmp_path: Path, count: int) -> None:
    words = ["--tiny", "--layers", "4", "--epochs", "2"]
    started = ranks.start([str(ranks.ROOT / "examples" / "train_pipeline.py"), *words], tmp_path, count)
    assert started.wait(LIMIT_S) == [0] * count, started.logs()
    losses = [record["values"]["loss"] for record in ranks.metrics(tmp_path / "output" / "metrics.jsonl", "log")]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert list((tmp_path / "output" / "checkpoints").glob("step_*.pt"))
