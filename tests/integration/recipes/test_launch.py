"""A copied recipe, launched on three unequal nodes of a lab: the results have the model, the card and the curves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.rig import recipes

LIMIT_S = 400

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("peft") is None, reason="not installed: peft"),
]


@pytest.fixture
def lab(ugro: Ugro) -> Iterator[None]:
    up = ugro("lab", "up", "--nodes", "3", "--speeds", "1,0.5,0.5", timeout=120)
    assert up.returncode == 0, up.stderr
    yield
    assert ugro("lab", "down", timeout=120).returncode == 0


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("name", ["causal_lm", "text_classification", "image_classification"])
def test_a_recipe_is_launched_on_three_nodes(ugro: Ugro, tmp_path: Path, name: str) -> None:
    here = tmp_path / "mine"
    shutil.copytree(recipes.SCRIPTS / name, here, ignore=shutil.ignore_patterns("__pycache__"))
    done = ugro("launch", "--nodes", "3", "train.py", "--", "--tiny", "--steps", "6", cwd=here, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluation: loss" in done.stdout

    pulled = tmp_path / "results"
    assert ugro("results", "last", "--pull", str(pulled), timeout=120).returncode == 0
    (about,) = pulled.rglob("ugro.json")
    assert json.loads(about.read_text())["task"] == name.replace("_", "-")
    card = (about.parent / "README.md").read_text()
    assert all(f"| lab{number} |" in card for number in (1, 2, 3)), card
    assert list(about.parent.glob("*.safetensors"))
    records = [json.loads(line) for path in pulled.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert any("val/loss" in record.get("values", {}) for record in records)
