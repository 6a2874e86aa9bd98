"""The runs of an experiment: which there are, what each sets, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.experiments.rules.grid import (
    MODELS,
    Abilities,
    Wish,
    baseline,
    document,
    expect_experiment,
    variants,
)
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import flags_of, grid_settings, grid_size, options_of
from ugro.kernel.support.errors import ConfigError, UgroError, Unsatisfiable, UsageError

PLAIN = Abilities()
ALL = Abilities({"exchange": "local"}, "STALE", "ROUND", ("fp16", "powersgd"))
FOUR = Wish(("gpt", "bert"), ("uniform", "adaptive"), seeds=2)


def test_an_experiment_is_a_grid_that_a_sweep_reads_with_the_seed_varying_slowest() -> None:
    spec = read(document(FOUR, PLAIN, {"nodes": 3}))
    assert (spec.method, grid_size(spec.parameters), spec.fields) == ("grid", 8, {"nodes": 3})
    assert spec.limits == {"max_parallel": 1}
    settings = [grid_settings(spec.parameters, number) for number in range(8)]
    assert [dict(one)["seed"] for one in settings] == ["1"] * 4 + ["2"] * 4
    assert [dict(one)["variant"] for one in settings[:4]] == ['"uniform"', '"adaptive"'] * 2
    assert flags_of(spec.options, settings[0]) == (("seed", "1"),)
    found = options_of(spec.options, settings[3])
    assert (found["script"], found["balance"]) == ("train_bert.py", "adaptive")
    assert found["args"][-2:] == ["--epochs", "2"]


def test_the_program_and_all_scripts_are_those_of_the_models() -> None:
    tree = document(replace(FOUR, models=tuple(MODELS)), PLAIN, {})
    assert tree["program"] == "train_gpt.py"
    scripts = [one["script"] for one in tree["ugro"]["options"]["model"].values()]
    assert scripts == ["train_gpt.py", "train_bert.py", "train_resnet50.py"]


def test_ablations_multiply_the_modes_and_only_what_is_unusual_is_a_flag() -> None:
    wish = replace(FOUR, modes=("uniform",), precision=("fp32", "bf16"), accumulate=(1, 4))
    found = {one.label: one.options for one in variants(wish, PLAIN)}
    assert found == {
        "uniform": {"balance": "off"},
        "uniform, accumulate 4": {"balance": "off", "args": ["--accumulate", "4"]},
        "uniform, bf16": {"balance": "off", "args": ["--precision", "bf16"]},
        "uniform, bf16, accumulate 4": {"balance": "off", "args": ["--precision", "bf16", "--accumulate", "4"]},
    }


def test_staleness_is_of_local_updates_alone_and_compression_of_the_others() -> None:
    wish = replace(FOUR, modes=("adaptive", "local"), compress=("none", "fp16"), staleness=(0, 2))
    found = {one.label: one.options for one in variants(wish, ALL)}
    assert found == {
        "adaptive": {"balance": "adaptive"},
        "adaptive, fp16 gradients": {"balance": "adaptive", "args": ["--compress", "fp16"]},
        "local, staleness 0": {"exchange": "local", "env": {"ROUND": "1", "STALE": "0"}},
        "local, staleness 2": {"exchange": "local", "env": {"ROUND": "1", "STALE": "2"}},
    }


@pytest.mark.parametrize(
    ("wish", "abilities", "kind", "words"),
    [
        (replace(FOUR, models=("gtp",)), PLAIN, UsageError, "unknown model 'gtp'"),
        (replace(FOUR, modes=("uniform", "fast")), PLAIN, UsageError, "unknown mode 'fast'"),
        (replace(FOUR, models=()), PLAIN, UsageError, "no model is named"),
        (replace(FOUR, modes=("local",)), PLAIN, Unsatisfiable, "no local updates"),
        (replace(FOUR, compress=("fp16",)), PLAIN, Unsatisfiable, "compresses no gradients"),
        (replace(FOUR, compress=("zip",)), ALL, UsageError, "unknown compression 'zip'"),
        (replace(FOUR, precision=("fp8",)), PLAIN, UsageError, "unknown precision 'fp8'"),
        (replace(FOUR, staleness=(1,)), ALL, UsageError, "only local updates can be stale"),
        (replace(FOUR, accumulate=(0,)), PLAIN, UsageError, "--accumulate: 0 is less than 1"),
        (replace(FOUR, models=("gpt", "gpt")), PLAIN, UsageError, "names something twice"),
        (replace(FOUR, seeds=100, accumulate=(1, 2, 3, 4)), PLAIN, UsageError, "1600 runs"),
    ],
)
def test_a_mistake_is_named(wish: Wish, abilities: Abilities, kind: type[UgroError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        document(wish, abilities, {})
    assert caught.value.hint or "less than" in words or "twice" in words


def test_a_variant_is_compared_with_equal_shares_under_the_same_ablation() -> None:
    labels = ["uniform", "uniform, bf16", "adaptive, bf16", "adaptive, accumulate 4"]
    assert baseline("adaptive, bf16", labels) == "uniform, bf16"
    assert baseline("adaptive, accumulate 4", labels) == "uniform"
    assert baseline("adaptive", ["static", "adaptive"]) is None


def test_a_sweep_without_variants_is_no_experiment() -> None:
    assert expect_experiment("x", document(FOUR, PLAIN, {})) == (["gpt", "bert"], ["uniform", "adaptive"], [1, 2])
    with pytest.raises(ConfigError, match="digits is no experiment"):
        expect_experiment("digits", {"parameters": {"seed": {"values": [1]}}})
