"""What a user gets wrong, and what is not there: one clear error on every rank, with a hint, and never a traceback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rig import ranks, recipes

LIMIT_S = 200

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("peft") is None, reason="not installed: peft"),
]


def refused(recipe: str, folder: Path, *words: str, count: int = 1) -> str:
    """What the last rank wrote."""
    own = {**recipes.VARIABLES, "HOME": str(folder)}
    started = ranks.start([recipes.script(recipe), *words], folder, count, own)
    codes = started.wait(LIMIT_S)
    assert all(0 < code < 5 for code in codes), started.logs()
    text = (folder / f"rank_{count - 1}.log").read_text()
    assert "Traceback" not in text
    assert text.count("error: ") == 1
    return text


def test_a_model_that_is_nowhere_is_one_error_on_every_rank(tmp_path: Path) -> None:
    said = refused("causal_lm", tmp_path, "--model", "gpt2", "--dataset", "wikitext", count=2)
    assert "model 'openai-community/gpt2' is not in the cache here and cannot be downloaded" in said
    assert "hf download openai-community/gpt2" in said


def test_a_dataset_that_is_nowhere_is_named(tmp_path: Path) -> None:
    said = refused("causal_lm", tmp_path, "--tiny", "--dataset", "wikitext")
    assert "dataset 'Salesforce/wikitext'" in said
    assert "--repo-type dataset" in said


def test_qlora_without_a_gpu_is_refused(tmp_path: Path) -> None:
    assert "--qlora needs an NVIDIA GPU" in refused("causal_lm", tmp_path, "--tiny", "--qlora")


def test_fp16_without_a_gpu_is_refused(tmp_path: Path) -> None:
    assert "--dtype bf16" in refused("causal_lm", tmp_path, "--tiny", "--dtype", "fp16")


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refused("text_classification", tmp_path, "--tiny", "--model", str(tmp_path / "empty"))
    assert "model 'empty' cannot be read" in said


def test_a_file_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    said = refused("causal_lm", tmp_path, "--tiny", "--dataset", str(tmp_path / "empty.txt"), "--steps", "1")
    assert "empty.txt" in said


def test_one_sample_is_trained_on_and_nothing_evaluated(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "the fox sees the owl"}\n')
    own = {**recipes.VARIABLES, "HOME": str(tmp_path)}
    words = ["--tiny", "--dataset", str(tmp_path / "one.jsonl"), "--epochs", "2", "--eval-split", "none"]
    started = ranks.start([recipes.script("causal_lm"), *words], tmp_path, 2, own)
    assert started.wait(LIMIT_S) == [0, 0], started.logs()
    assert "## Results\n\nNone." in (tmp_path / "output" / "model" / "README.md").read_text()
