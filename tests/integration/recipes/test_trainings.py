"""Recipes on real ranks with models of the real libraries: exact on unequal ranks, resumed exactly, usable after."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks, recipes
from tests.rig.waiting import wait_until

LIMIT_S = 300
UNEQUAL = {"UGRO_BALANCE": "static", "UGRO_SPEEDS": "1,0.5,0.25"}
NEAR = 2e-5  # of parameters, after a few steps: sums are added up in another order

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("peft") is None, reason="not installed: peft"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    folder = tmp_path_factory.mktemp("made")
    recipes.ask("make", str(folder))
    return folder


def start(
    recipe: str, folder: Path, count: int, *words: str, variables: Mapping[str, str] | None = None
) -> ranks.Ranks:
    own = {**recipes.VARIABLES, "HOME": str(folder), **(variables or {})}
    return ranks.start([recipes.script(recipe), *words], folder, count, own)


def trained(recipe: str, folder: Path, count: int, *words: str, variables: Mapping[str, str] | None = None) -> Path:
    """The folder of the trained model."""
    started = start(recipe, folder, count, *words, variables=variables)
    assert started.wait(LIMIT_S) == [0] * count, started.logs()
    return folder / "output" / "model"


def logged(model: Path, name: str) -> list[float]:
    records = ranks.metrics(model.parent / "metrics.jsonl", "log")
    return [float(record["values"][name]) for record in records if name in record["values"]]


def parameters(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (path,) = model.glob("*.safetensors")
    return dict(load_file(path))


def distance(one: Path, other: Path) -> float:
    mine, theirs = parameters(one), parameters(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


def about(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "ugro.json").read_text()))


@pytest.mark.parametrize(
    ("recipe", "task", "score"),
    [
        ("causal_lm", "text-generation", "perplexity"),
        ("text_classification", "text-classification", "accuracy"),
        ("image_classification", "image-classification", "f1"),
    ],
)
def test_the_tiny_training_learns_and_its_model_can_be_used(tmp_path: Path, recipe: str, task: str, score: str) -> None:
    model = trained(recipe, tmp_path, 1, "--tiny")
    losses, scores = logged(model, "loss"), logged(model, f"val/{score}")
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert len(scores) == 2, "after every epoch"
    assert len(logged(model, "val/loss")) == 2
    assert logged(model, "val/loss")[1] < logged(model, "val/loss")[0]
    assert about(model)["kind"] == "full"
    found = json.loads(recipes.ask("use", str(model)))
    assert found["card"]["pipeline_tag"] == task
    assert all(math.isfinite(one) for one in found["logits"])
    assert list((tmp_path / "output" / "checkpoints").glob("step_*.pt"))


LLAMA = ("--lr", "1e-3", "--batch-size", "9", "--steps", "5", "--seq-length", "24", "--eval-split", "0.2")


@pytest.mark.parametrize("packing", ["--no-packing", "--packing"])
def test_lora_on_unequal_ranks_is_that_of_one_process(tmp_path: Path, made: Path, packing: str) -> None:
    """Samples have from one to over twenty tokens to predict: what counts is the token."""
    words = (*("--model", str(made / "llama"), "--dataset", str(made / "texts.jsonl")), *LLAMA, packing)
    variables = {"UGRO_MODEL_SOURCE": "/home/me/llama"}
    alone = trained("causal_lm", tmp_path / "alone", 1, *words, variables=variables)
    shared = trained("causal_lm", tmp_path / "shared", 3, *words, variables={**UNEQUAL, **variables})
    assert distance(alone, shared) < NEAR
    assert logged(alone, "val/loss") == pytest.approx(logged(shared, "val/loss"), rel=1e-5)
    shares = ranks.metrics(shared.parent / "metrics.jsonl", "profile")[0]["shares"]
    assert shares == [6, 2, 1], "unequal"
    theirs, ours = (ranks.metrics(one.parent / "metrics.jsonl", "profile") for one in (alone, shared))
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in theirs], rel=1e-4)

    assert about(shared) == {
        "format": 1, "task": "causal-lm", "kind": "lora", "base": "llama", "base_path": "/home/me/llama",
        "labels": None,
    }  # fmt: skip
    (wrapped,) = ranks.metrics(shared.parent / "metrics.jsonl", "model")
    assert wrapped["gradient_bytes"] == sum(4 * one.numel() for one in parameters(shared).values())
    assert wrapped["gradient_bytes"] < wrapped["parameters"]
    assert json.loads((shared / "adapter_config.json").read_text())["base_model_name_or_path"] == "llama"
    found = json.loads(recipes.ask("use", str(shared), str(made / "llama")))
    assert found["logits"] != found["without"], "the adapter does something"
    card = (shared / "README.md").read_text()
    assert "| 2 | node2 | CPU, 1 threads | 1 (11%) |" in card


def test_lora_on_bert_classifies_on_unequal_ranks_as_one_process(tmp_path: Path, made: Path) -> None:
    given = ("--model", str(made / "bert"), "--dataset", str(made / "reviews.csv"))
    words = (*given, "--lr", "1e-3", "--batch-size", "9", "--steps", "5", "--seq-length", "32")
    alone = trained("text_classification", tmp_path / "alone", 1, *words)
    shared = trained("text_classification", tmp_path / "shared", 3, *words, variables=UNEQUAL)
    assert distance(alone, shared) < NEAR
    for name in ("val/loss", "val/accuracy", "val/f1"):
        assert logged(alone, name) == pytest.approx(logged(shared, name), rel=1e-5)
    assert about(shared)["labels"] == ["tame", "wild"]
    found = json.loads(recipes.ask("use", str(shared), str(made / "bert")))
    assert found["logits"] != found["without"]


@pytest.mark.parametrize("norms", ["frozen", "sync"])
def test_images_on_unequal_ranks_are_learned_as_by_one_process(tmp_path: Path, made: Path, norms: str) -> None:
    given = ("--model", str(made / "resnet"), "--dataset", str(made / "pictures"), "--batchnorm", norms)
    words = (*given, "--lr", "1e-3", "--batch-size", "9", "--steps", "2", "--eval-split", "0.2")
    alone = trained("image_classification", tmp_path / "alone", 1, *words)
    shared = trained("image_classification", tmp_path / "shared", 3, *words, variables=UNEQUAL)
    assert distance(alone, shared) < 10 * NEAR
    assert about(shared)["labels"] == ["blue", "red"]
    frozen = [one for name, one in parameters(shared).items() if "running_mean" in name]
    assert all(bool((one == 0).all()) for one in frozen) is (norms == "frozen")
    assert json.loads(recipes.ask("use", str(shared)))["labels"] == {"0": "blue", "1": "red"}


def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, made: Path) -> None:
    """GPT-2 has dropout: the random generators of every rank go on, too."""
    given = ("--model", str(made / "gpt2"), "--dataset", str(made / "texts.jsonl"), "--batch-size", "6", "--lr", "1e-3")
    words = (*given, "--seq-length", "24", "--epochs", "4", "--checkpoint-steps", "3")
    equal = {"UGRO_BALANCE": "off"}
    undisturbed = trained("causal_lm", tmp_path / "undisturbed", 2, *words, variables=equal)

    folder = tmp_path / "disturbed"
    checkpoints = folder / "output" / "checkpoints"
    started = start("causal_lm", folder, 2, *words, variables=equal)
    wait_until(lambda: list(checkpoints.glob("step_*.pt")), LIMIT_S, "the first checkpoint")
    for process in started.processes:
        process.kill()
    assert [process.wait() for process in started.processes] == [-9, -9], "it was over before it was killed"

    resumed = trained(
        "causal_lm", folder, 2, *words, variables={**equal, "UGRO_RESUME_DIR": str(checkpoints), "UGRO_ATTEMPT": "2"}
    )
    runs = ranks.metrics(resumed.parent / "metrics.jsonl", "run")
    assert runs[-1]["resumed_from"] >= 3
    assert distance(undisturbed, resumed) == 0
    assert logged(undisturbed, "val/loss")[-1] == logged(resumed, "val/loss")[-1]
    size = min(path.stat().st_size for path in checkpoints.glob("step_*.pt"))
    assert size < 3 * sum(4 * one.numel() for one in parameters(resumed).values()) + 60_000, "the adapter alone"


def test_documents_in_a_packed_sequence_do_not_see_each_other(made: Path) -> None:
    for name, found in json.loads(recipes.ask("apart", str(made))).items():
        assert found["packed"] < 1e-5, name
        assert found["mixed"] > 0.01, "without positions they do"
        assert found["said"] is True


def test_all_parameters_are_trained_on_request(tmp_path: Path, made: Path) -> None:
    words = ("--model", str(made / "llama"), "--dataset", str(made / "texts.jsonl"), "--full", "--steps", "2")
    model = trained("causal_lm", tmp_path, 2, *words, "--gradient-checkpointing", "--dtype", "bf16")
    assert about(model)["kind"] == "full"
    (wrapped,) = ranks.metrics(model.parent / "metrics.jsonl", "model")
    assert wrapped["gradient_bytes"] == 4 * wrapped["parameters"]
    assert json.loads(recipes.ask("use", str(model)))["card"]["library_name"] == "transformers"


def test_datasets_of_the_library_are_read_from_folders(tmp_path: Path) -> None:
    found = json.loads(recipes.ask("tables", str(tmp_path)).splitlines()[-1])
    table = [[{"text": "a", "label": 1}, {"text": "b", "label": 0}], ["neg", "pos"]]
    both = {"train": table, "test": table}
    assert found == {"one": {"train": table}, "two": both, "hub": both}
