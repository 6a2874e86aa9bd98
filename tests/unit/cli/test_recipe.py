"""How a command line is divided when ``--model`` takes the place of a script, and what ``ugro recipe`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.cli.jobs.options import divide_all, names_recipe
from ugro.features.recipes.trainings import catalog
from ugro.kernel.support.errors import NotFound, UsageError

OPTIONS = {"--model": True, "--dataset": True, "--recipe": True, "--nodes": True, "--name": True, "-d": False}


@pytest.mark.parametrize(
    ("words", "is_recipe"),
    [
        ("--model llama-7b --dataset wikitext --nodes 3 --epochs 3", True),
        ("--nodes 3 --model=gpt2", True),
        ("--epochs 3 --model gpt2", True),
        ("--recipe causal_lm --tiny", True),
        ("train.py --model gpt2", False),
        ("--nodes 3 train.py --model gpt2", False),
        ("-d train.py", False),
        ("--epochs 3 train.py", False),
        ("", False),
    ],
)
def test_a_model_before_any_script_is_ours_and_after_it_the_scripts(words: str, is_recipe: bool) -> None:
    assert names_recipe(words.split(), OPTIONS) is is_recipe


def test_unknown_flags_go_to_the_recipes_script() -> None:
    words = ["--lr", "1e-4", "--model", "gpt2", "--nodes", "3", "--lora_r", "8", "-d", "--packing"]
    assert divide_all(words, OPTIONS) == (
        ["--model", "gpt2", "--nodes", "3", "-d"],
        ["--lr", "1e-4", "--lora_r", "8", "--packing"],
    )
    assert divide_all(["--model", "gpt2", "train.py"], OPTIONS)[1] == ["train.py"], "refused by the command"


def test_every_recipe_is_whole() -> None:
    for recipe in catalog.all_recipes():
        assert Path(recipe.folder, recipe.script).is_file()
        assert recipe.packages
        assert recipe.models
        assert recipe.datasets
        assert {"--batch-size", "--epochs", "--tiny"} <= {flag.name for flag in recipe.flags}
        assert recipe.default("--batch-size")


def test_a_copy_is_the_recipe_and_goes_into_an_empty_folder_only(tmp_path: Path) -> None:
    names = catalog.copy("causal-lm", tmp_path / "mine")
    assert {"train.py", "recipe.yaml"} <= set(names)
    assert not any("__" in name for name in names)
    with pytest.raises(UsageError, match="is not an empty folder"):
        catalog.copy("causal_lm", tmp_path / "mine")
    with pytest.raises(NotFound, match="there is no recipe 'casual_lm'") as error:
        catalog.find("casual_lm")
    assert error.value.hint == "did you mean causal_lm?"
