"""What counts as a complete model or data set in the cache of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ugro.features.recipes import on_node as hub_cache


def put(cache: Path, repo: str, files: dict[str, str], kind: str = "model", revision: str = "abc123") -> Path:
    """As the library does: files are links to blobs."""
    place = cache / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = place / "snapshots" / revision
    for folder in (snapshot, place / "blobs", place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(revision)
    for number, (name, text) in enumerate(files.items()):
        (place / "blobs" / f"b{number}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/b{number}")
    return snapshot


WHOLE = {"config.json": "{}", "model.safetensors": "x"}


def test_a_complete_model_is_found_where_the_library_would_look(tmp_path: Path) -> None:
    hub = tmp_path / "hf" / "hub"
    snapshot = put(hub, "org/tiny", WHOLE)
    for env in ({"HF_HOME": str(tmp_path / "hf")}, {"HF_HUB_CACHE": str(hub)}, {"HUGGINGFACE_HUB_CACHE": str(hub)}):
        assert hub_cache.find("model", "org/tiny", env) == str(snapshot)
    assert hub_cache.find("model", "org/other", {"HF_HOME": str(tmp_path / "hf")}) is None
    put(tmp_path / "huggingface" / "hub", "gpt2", WHOLE)
    assert hub_cache.find("model", "gpt2", {"XDG_CACHE_HOME": str(tmp_path)}) is not None


def test_half_a_download_is_none(tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    snapshot = put(tmp_path, "org/half", WHOLE)
    (tmp_path / "models--org--half" / "blobs" / "b1").unlink()
    assert hub_cache.find("model", "org/half", env) is None
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    files = {"config.json": "{}", "model.safetensors.index.json": index, "model-1.safetensors": "x"}
    snapshot = put(tmp_path, "org/sharded", files)
    assert hub_cache.find("model", "org/sharded", env) is None
    (snapshot / "model-2.safetensors").write_text("y")
    assert hub_cache.find("model", "org/sharded", env) == str(snapshot)
    put(tmp_path, "org/only-config", {"config.json": "{}"})
    assert hub_cache.find("model", "org/only-config", env) is None
    put(tmp_path, "org/data", {"train.parquet": "x"}, kind="dataset")
    assert hub_cache.find("dataset", "org/data", env) is not None


@pytest.mark.parametrize("repo", ["../x", "a/b/c", "", "/etc", "a b"])
def test_a_name_that_is_none_is_refused(repo: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model"):
        hub_cache.find("model", repo, {"HF_HOME": str(tmp_path)})
