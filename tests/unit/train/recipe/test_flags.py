"""The command line of recipes, and that recipe.yaml says the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

import ugro
from ugro.train.recipe import command_line as flags

RECIPES = ("causal_lm", "text_classification", "image_classification")
FOLDER = Path(ugro.__file__).parent / "features/recipes/trainings"


def script(name: str) -> Any:
    return importlib.import_module(f"ugro.features.recipes.trainings.{name}.train")


def described(name: str) -> Any:
    return yaml.safe_load((FOLDER / name / "recipe.yaml").read_text())


def test_every_recipe_is_here() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/recipe.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_describes_its_script(name: str) -> None:
    about = described(name)
    assert about["flags"] == flags.declared(script(name).parser())
    assert about["task"] == name.replace("_", "-")
    assert (FOLDER / name / about["script"]).is_file()
    assert (FOLDER / name / "README.md").is_file()
    assert len(about["summary"].splitlines()) == 1
    assert any(package.startswith("torch") for package in about["environment"]["packages"])


@pytest.mark.parametrize("name", RECIPES)
def test_short_names_lead_to_ids_of_the_hub(name: str) -> None:
    about = described(name)
    ids = [*about["models"].values(), *(entry["path"] for entry in about["datasets"].values())]
    assert ids
    assert all(one.count("/") == 1 for one in ids)
    known = {"path", "name", "split", "eval_split", "text", "label", "image", "rows"}
    assert all(set(entry) <= known for entry in about["datasets"].values())


def test_flags_may_be_written_with_underscores() -> None:
    parsed = script("causal_lm").parse_arguments(["--tiny", "--lora_r", "8", "--learning_rate=0.5", "--batch_size=4"])
    assert (parsed.lora_r, parsed.lr, parsed.batch_size) == (8, 0.5, 4)


def test_what_the_user_says_holds_with_tiny_too() -> None:
    assert script("causal_lm").parse_arguments(["--tiny"]).epochs == 2
    assert script("causal_lm").parse_arguments(["--tiny", "--epochs", "7"]).epochs == 7


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model", "gpt2"],
        ["--tiny", "--full", "--qlora"],
        ["--tiny", "--epochs", "0"],
        ["--tiny", "--lr", "nan"],
        ["--tiny", "--lr", "-1"],
        ["--tiny", "--warmup", "1.5"],
        ["--tiny", "--dtype", "int3"],
        ["--tiny", "--lora", "8"],
        ["--tiny", "--seq-length", "1"],
    ],
)
def test_wrong_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script("causal_lm").parse_arguments(argv)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
