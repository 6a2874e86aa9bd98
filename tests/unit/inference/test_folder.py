from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ugro.features.services.inference.loading import read_folder
from ugro.kernel.support.errors import UgroError


def model(folder: Path, *, weights: str = "model.safetensors", **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if weights:
        (folder / weights).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("architecture", "task", "is_for_images"),
    [
        ("LlamaForCausalLM", "generate", False),
        ("GPT2LMHeadModel", "generate", False),
        ("BertForSequenceClassification", "classify", False),
        ("ResNetForImageClassification", "classify", True),
        ("BertModel", "embed", False),
        ("BertForMaskedLM", "embed", False),
        ("T5ForConditionalGeneration", None, False),
    ],
)
def test_the_architecture_says_what_a_model_does(
    tmp_path: Path, architecture: str, task: str | None, is_for_images: bool
) -> None:
    found = read_folder(model(tmp_path, config={"architectures": [architecture]}))
    assert (found.task, found.is_for_images, found.is_adapter) == (task, is_for_images, False)


def test_a_recipe_says_it_itself(tmp_path: Path) -> None:
    own = {"format": 1, "task": "image-classification", "kind": "full", "labels": ["cat", "dog"]}
    found = read_folder(model(tmp_path, config={}, ugro=own))
    assert (found.task, found.is_for_images, found.labels) == ("classify", True, ("cat", "dog"))
    named = {"format": 1, "task": "text-classification", "labels": {"1": "b", "0": "a", "10": "k", "2": "c"}}
    assert read_folder(model(tmp_path, config={}, ugro=named)).labels == ("a", "b", "c", "k")


def test_the_base_of_an_adapter_is_the_first_that_is_here(tmp_path: Path) -> None:
    adapter = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "hub/name"}
    folder = model(tmp_path / "lora", weights="adapter_model.safetensors", adapter_config=adapter)
    found = read_folder(folder)
    assert (found.is_adapter, found.task, found.base) == (True, "generate", "hub/name")
    own = {"format": 1, "task": "causal-lm", "kind": "lora", "base": "tiny", "base_path": str(tmp_path)}
    assert read_folder(model(folder, weights="", ugro=own)).base == str(tmp_path)
    gone = {**own, "base_path": str(tmp_path / "gone")}
    assert read_folder(model(folder, weights="", ugro=gone)).base == "hub/name"


@pytest.mark.parametrize(
    ("files", "weights", "message"),
    [
        ({}, "model.safetensors", "neither config.json nor adapter_config.json"),
        ({"config": {}}, "", "has no weights"),
        ({"config": {}}, "pytorch_model.bin", "loads .safetensors only"),
        ({"config": {}}, "model.gguf", "model.gguf"),
        ({"config": {}, "ugro": {"format": 9}}, "model.safetensors", "format 9"),
        ({"config": ["x"]}, "model.safetensors", "not a JSON object"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    tmp_path: Path, files: dict[str, Any], weights: str, message: str
) -> None:
    with pytest.raises(UgroError, match=message):
        read_folder(model(tmp_path, weights=weights, **files))


def test_a_broken_description_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UgroError, match=r"config\.json cannot be read"):
        read_folder(tmp_path)
    with pytest.raises(UgroError, match="is a file"):
        read_folder(tmp_path / "config.json")


def test_a_file_that_was_copied_in_part_is_named_with_the_tensor_in_which_it_ends(tmp_path: Path) -> None:
    folder = model(tmp_path / "cut", config={"architectures": ["LlamaForCausalLM"]})
    tensors = {"b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}
    tensors |= {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(32)
    file = folder / "model.safetensors"
    file.write_bytes(whole)
    assert read_folder(folder).task
    for missing, tensor in ((1, "b"), (16, "b"), (17, "a")):
        file.write_bytes(whole[:-missing])
        says = f"model.safetensors is cut off in the tensor {tensor}: {len(whole) - missing} of {len(whole)} bytes"
        with pytest.raises(UgroError, match=says):
            read_folder(folder)


@pytest.mark.parametrize("text", [b"", b"x", b"no safetensors", bytes(8), b"\2" + bytes(7) + b"[]", b"\xff" * 9])
def test_a_file_of_another_kind_is_left_to_the_library(tmp_path: Path, text: bytes) -> None:
    folder = model(tmp_path / "other", config={"architectures": ["LlamaForCausalLM"]})
    (folder / "model.safetensors").write_bytes(text)
    assert read_folder(folder).task
