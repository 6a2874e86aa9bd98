"""What an experiment may ask for, as the schema of jobs and the training's own signature say."""

from __future__ import annotations

import inspect

from ugro.cli.jobs.options import option_with
from ugro.features.experiments.cli_show import abilities
from ugro.features.experiments.client import scripts
from ugro.features.experiments.rules.grid import MODELS
from ugro.train.run import Run


def test_the_option_that_has_a_word_is_found_in_the_schema() -> None:
    assert option_with("adaptive") == "balance"
    assert option_with("no such word") is None


def test_local_updates_and_compression_are_possible_where_they_are_declared() -> None:
    found = abilities()
    option = option_with("local")
    assert found.local == (None if option is None else {option: "local"})
    assert (found.compress is not None) == ("compress" in inspect.signature(Run.wrap).parameters)


def test_the_trainings_are_found_with_all_flags_that_an_experiment_uses() -> None:
    for model in MODELS.values():
        text = (scripts() / model.script).read_text()
        own = [word for words in model.sizes.values() for word in words.split() if word.startswith("--")]
        for flag in {*own, "--epochs", "--seed", "--precision", "--accumulate", "--compress"}:
            assert f'"{flag}"' in text, (model.script, flag)
