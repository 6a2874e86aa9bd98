"""Scores over all ranks, the learning rate, checkpoints of what is trained, the model card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import UsageError
from ugro.train import group as frozen
from ugro.train.loader import Loader, checked_weights
from ugro.train.recipe import output
from ugro.train.recipe import training as evaluation
from ugro.train.recipe.command_line import Named
from ugro.train.recipe.inputs import Look, by_class, read
from ugro.train.recipe.output import Facts, Hardware, card
from ugro.train.recipe.training import Trained, kept, rise_and_fall
from ugro.train.rules.balance import Plan
from ugro.train.samples import Handed, Order, Progress, Schedule, Slice, Weights

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_every_sample_is_evaluated_by_one_rank(count: int, shares: list[int]) -> None:
    parts = [evaluation.own_part(count, shares, rank) for rank in range(len(shares))]
    assert [index for part in parts for index in part] == list(range(count))
    assert all(abs(len(part) - count * share / sum(shares)) <= 1 for part, share in zip(parts, shares, strict=True))


def test_macro_f1_is_the_mean_over_classes_that_occur() -> None:
    # Class 0: 2 of 3 found, 2 of 2 right; class 1: 1 of 1 found, 1 of 2 right; class 2 does not occur.
    assert evaluation.macro_f1([2, 1, 0], [2, 2, 0], [3, 1, 0]) == pytest.approx((0.8 + 2 / 3) / 2)
    assert evaluation.macro_f1([0], [0], [0]) == 0


def test_counts_add_up_over_batches() -> None:
    counts = evaluation.Counts(3)
    logits = torch.eye(3)[[0, 1, 1, 2]] * 10
    labels = torch.tensor([0, 1, 0, 2])
    counts.add(logits[:3], labels[:3])
    counts.add(logits[3:], labels[3:])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert counts.loss == pytest.approx(float(expected))
    assert counts._right.tolist() == [1, 1, 1]
    assert counts._said.tolist() == [1, 2, 1]


def test_modes_are_restored_after_an_evaluation() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].eval()
    with evaluation.evaluating(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_the_learning_rate_rises_in_a_line_and_falls_to_zero() -> None:
    factor = rise_and_fall(100, 3)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(99) < 0.01
    assert factor(200) == pytest.approx(0)


# --- weights of samples -----------------------------------------------------------------------------------------


def test_a_part_counts_as_much_as_its_weights() -> None:
    slice_ = Slice(0, (2, 2), 2, 1, 4, [0, 1], Weights([1.0, 3.0], 8.0))
    assert [slice_.part(0, 1), slice_.part(1, 1), slice_.part(0, 2)] == [1 / 8, 3 / 8, 1 / 2]
    assert Slice(0, (2, 2), 2, 1, 4, [0, 1]).part(0, 2) == 0.5
    assert Slice(0, (2, 2), 2, 1, 4, [0, 1], Weights([0.0, 0.0], 0.0)).part(0, 2) == 0


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [[1.0, 1.0]]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError):
        checked_weights(weights, 2)
    assert checked_weights(None, 2) is None
    assert checked_weights([1, 2], 2).tolist() == [1.0, 2.0]


# --- what is trained --------------------------------------------------------------------------------------------


def half_frozen() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model


def test_a_checkpoint_of_a_partly_frozen_model_has_what_is_trained() -> None:
    model, other = half_frozen(), half_frozen()
    state = kept(model).state_dict()
    assert set(state) == {"1.weight", "1.bias"}
    with torch.no_grad():
        other[1].weight.zero_()
    kept(other).load_state_dict(state)
    assert torch.equal(other[1].weight, model[1].weight)
    assert kept(model.requires_grad_(True)) is model


def test_a_checkpoint_of_other_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="other trained parameters"):
        Trained(half_frozen()).load_state_dict({"0.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_digest_of_frozen_parameters_notices_a_changed_bit(dtype: torch.dtype) -> None:
    model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.arange(6).to(dtype), requires_grad=False)})
    before = frozen.digest(model, ["a"])
    assert frozen.digest(model, ["a"]) == before
    with torch.no_grad():
        model["a"][3] += 1
    assert frozen.digest(model, ["a"]) != before


# --- the model folder -------------------------------------------------------------------------------------------


def facts(base: str = "org/base", kind: str = "lora") -> Facts:
    return Facts(
        task="causal-lm", kind=kind, name="a model", base=Named(base, base, False, {}),
        dataset=Named("org/data", "org/data", False, {}), data={"training": "3 sequences"},
        arguments=argparse.Namespace(lr=1e-3, full=False, model="base|x"),
        hardware=[Hardware("gpu1", "RTX | 4070", 6), Hardware("gpu2", "CPU", 2)], training={"steps": "3"},
        scores={"loss": 1.25}, usage="print(1)",
    )  # fmt: skip


def test_a_model_card_has_front_matter_and_the_shares_of_ranks() -> None:
    text = card(facts())
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "peft", "base_model": "org/base", "base_model_relation": "adapter", "datasets": ["org/data"],
        "pipeline_tag": "text-generation", "tags": ["ugro", "lora"],
    }  # fmt: skip
    assert "| 0 | gpu1 | RTX \\| 4070 | 6 (75%) |" in body
    assert "| Loss | 1.2500 |" in body
    assert "`--full`" not in body


def test_a_local_base_is_not_claimed_to_be_on_the_hub() -> None:
    front = yaml.safe_load(card(facts("my-llama", "full")).split("---\n", 2)[1])
    assert "base_model" not in front
    assert front["library_name"] == "transformers"


def test_the_folder_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(output.SOURCE, "/home/me/models/base")
    output._write(tmp_path, facts(), lambda folder: (folder / "old").touch(), ["b"])
    path = output._write(tmp_path, facts(), lambda folder: (folder / "new").touch(), ["a"])
    assert sorted(one.name for one in path.iterdir()) == ["README.md", "new", "ugro.json"]
    assert json.loads((path / "ugro.json").read_text()) == {
        "format": 1, "task": "causal-lm", "kind": "lora", "base": "org/base", "base_path": "/home/me/models/base",
        "labels": ["a"],
    }  # fmt: skip
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


# --- images -----------------------------------------------------------------------------------------------------


def test_a_look_is_what_the_processor_says() -> None:
    assert Look.of({"size": {"shortest_edge": 224}, "crop_size": {"height": 128, "width": 128}}).side == 128
    assert Look.of({"size": {"shortest_edge": 256}}).side == 256
    assert Look.of({"size": 64, "image_mean": [0.5], "image_std": [0.5]}).mean == (0.5,)
    assert Look.of({}).side == 224


@pytest.mark.parametrize("shape", [(3, 40, 30), (3, 1, 1), (3, 5, 400)])
def test_images_of_any_shape_become_squares(shape: tuple[int, int, int]) -> None:
    look = Look.of({"size": 16, "image_mean": [0.0] * 3, "image_std": [1.0] * 3})
    pixels = torch.full(shape, 255, dtype=torch.uint8)
    for chance in (None, torch.Generator().manual_seed(1)):
        seen = look.seen(pixels, chance)
        assert seen.shape == (3, 16, 16)
        assert torch.allclose(seen, torch.ones(()))


def test_images_are_found_by_class_and_read(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.ppm").write_bytes(b"P6\n2 1\n255\n" + bytes([1, 2, 3, 4, 5, 6]))
    (tmp_path / "empty").mkdir()
    found = by_class(tmp_path)
    assert list(found) == ["cat", "dog"]
    assert read(found["cat"][0]).tolist() == [[[1, 4]], [[2, 5]], [[3, 6]]]
    (tmp_path / "cat" / "1.ppm").write_bytes(b"P6\n2 1\n255\n" + bytes(5))
    with pytest.raises(UsageError, match="not a binary PPM"):
        read(tmp_path / "cat" / "1.ppm")
    with pytest.raises(UsageError, match="no images"):
        by_class(tmp_path / "empty")


# --- a training that resumes ------------------------------------------------------------------------------------


class Course:
    """A run, as a loader sees it."""

    def __init__(self) -> None:
        self.progress = Progress(seed=3)

    def boundary(self) -> None: ...
    def fetching(self) -> None: ...
    def fetched(self, slice_: Slice, handed: Handed) -> None: ...
    def exhausted(self) -> None: ...


def test_a_loader_leaves_torchs_random_numbers_alone() -> None:
    """Otherwise a training that is resumed within an epoch would go on with other noise than an undisturbed one."""
    loader = Loader(Course(), list(range(6)), Order(6, 2), Schedule(Plan((2,), (1,), "for a test")), 0, {})
    before = torch.get_rng_state()
    assert sorted(one for batch in loader for one in batch.tolist()) == list(range(6))
    assert torch.equal(torch.get_rng_state(), before)
