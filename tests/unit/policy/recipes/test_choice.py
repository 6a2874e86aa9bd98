"""Which recipe a model needs, what a name means, and how a model gets to nodes that lack it."""

from __future__ import annotations

import pytest

from ugro.features.recipes.rules import Whereabouts, check_flags, choose, dataset_id, hub_id, travel
from ugro.features.recipes.trainings import catalog
from ugro.kernel.support.errors import UgroError, UsageError

RECIPES = catalog.all_recipes()


def test_short_names_hub_ids_and_mistakes() -> None:
    assert hub_id(RECIPES, "llama-7b") == "huggyllama/llama-7b"
    assert hub_id(RECIPES, "org/own") == "org/own"
    with pytest.raises(UsageError, match="unknown model 'lama-7b'") as error:
        hub_id(RECIPES, "lama-7b")
    assert error.value.hint is not None
    assert error.value.hint.startswith("did you mean llama-7b?")
    assert dataset_id(catalog.find("causal-lm"), "wikitext") == "Salesforce/wikitext"
    with pytest.raises(UsageError, match="unknown dataset"):
        dataset_id(catalog.find("causal_lm"), "nothing-like-it")


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("--lora_rr 8", "recipe causal_lm has no option --lora_rr", "did you mean --lora-r?"),
        ("--learning-rat=1", "has no option --learning-rat", "did you mean --learning-rate?"),
        ("--zzz", "has no option --zzz", "its options: ugro recipe show causal_lm"),
        ("--full 8", "'8' is not an option", "its options: ugro recipe show causal_lm"),
        ("--lora-r --full", "--lora-r needs a value", "--lora-r: rank of the LoRA matrices"),
        ("--epochs", "--epochs needs a value", "--epochs: passes over the training data"),
    ],
)
def test_a_flag_that_a_recipe_lacks_is_refused_before_the_launch(words: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        check_flags(catalog.find("causal_lm"), words.split())
    assert says in error.value.message
    assert error.value.hint == hint


def test_flags_of_a_recipe_are_known_by_all_their_names() -> None:
    words = "--lora_r 8,16 --learning_rate=1e-3 --lr -1 --full --no_packing --packing --eval-split none --tiny"
    check_flags(catalog.find("causal_lm"), words.split())


@pytest.mark.parametrize(
    ("model", "dataset", "config", "recipe"),
    [
        (None, None, {"architectures": ["LlamaForCausalLM"]}, "causal_lm"),
        (None, None, {"architectures": ["GPT2LMHeadModel"]}, "causal_lm"),
        (None, None, {"architectures": ["BertForMaskedLM"]}, "text_classification"),
        (None, None, {"architectures": ["ResNetForImageClassification"]}, "image_classification"),
        ("google-bert/bert-base-uncased", "imdb", None, "text_classification"),
        ("org/own", "cifar10", None, "image_classification"),
    ],
)
def test_the_model_says_which_recipe(model: str | None, dataset: str | None, config: dict[str, list[str]] | None,
                                     recipe: str) -> None:  # fmt: skip
    assert choose(RECIPES, model, dataset, config).name == recipe


def test_what_nobody_can_tell_is_asked() -> None:
    with pytest.raises(UsageError, match="which recipe trains org/own"):
        choose(RECIPES, "org/own", "imdb", None)


def about(
    here: str | None,
    nodes: dict[str, bool],
    reaches: dict[str, bool] | None = None,
    repo: str = "org/model",
    has_token: bool = False,
) -> Whereabouts:
    return Whereabouts("model", repo, here, nodes, reaches or {}, has_token)


def test_a_model_travels_only_where_it_is_lacking() -> None:
    assert travel(about("/cache", {"a": True, "b": True}))[0] is None
    assert travel(about("/cache", {"a": True, "b": False}))[0] == "/cache"
    folder, note = travel(about(None, {"a": True, "b": False}, {"b": True}))
    assert (folder, note) == (None, "model org/model: b will download it")


def test_without_a_node_that_could_be_asked_nothing_is_claimed() -> None:
    assert travel(about(None, {})) == (None, "model org/model: no node could be asked whether it has it")
    assert travel(about("/cache", {}))[0] == "/cache"


def test_nodes_that_reach_the_hub_are_offered_too() -> None:
    with pytest.raises(UgroError) as error:
        travel(about(None, {"a": True, "b": False, "c": False}, {"b": False, "c": True}))
    assert error.value.hint is not None
    assert error.value.hint.endswith("--only a --only c")


def test_a_model_that_nobody_gets_says_how_to_get_it() -> None:
    with pytest.raises(UgroError, match="not in the cache of b, nor of this machine") as error:
        travel(about(None, {"a": True, "b": False}, {"b": False}))
    assert error.value.hint is not None
    assert "hf download org/model" in error.value.hint
    assert error.value.hint.endswith("--only a")
    gated = about(None, {"a": False}, {"a": True}, repo="meta-llama/Llama-3.2-1B")
    with pytest.raises(UgroError, match="is gated") as error:
        travel(gated)
    assert error.value.hint is not None
    assert "--env HF_TOKEN" in error.value.hint
    with_token = about(None, {"a": False}, {"a": True}, repo="meta-llama/Llama-3.2-1B", has_token=True)
    assert travel(with_token)[0] is None
