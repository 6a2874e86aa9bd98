"""Sweep files in W&B's format: read unchanged, and refused by name where we cannot do it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from ugro.features.sweeps.rules.reading import (
    check_command,
    expanded,
    nested,
    read,
    template,
    variables,
    with_variables,
)
from ugro.kernel.support.errors import ConfigError

BAYES = """
program: train.py
name: sweepdemo
project: demo
method: bayes
metric: {goal: minimize, name: validation_loss, target: 0.01}
parameters:
  learning_rate: {min: 0.0001, max: 0.1}
  batch_size: {values: [16, 32, 64]}
  epochs: {value: 5}
  optimizer:
    parameters:
      name: {values: [adam, sgd]}
      momentum: {distribution: uniform, min: 0.5, max: 0.99}
early_terminate: {type: hyperband, min_iter: 3, eta: 2, strict: true}
command: ["${env}", "${interpreter}", "${program}", "--fast", "${args}"]
run_cap: 20
"""
HYPERBAND = """
program: cnn.py
method: random
metric: {name: val_acc, goal: maximize}
parameters:
  lr: {distribution: log_uniform, min: -9.21, max: -2.3}
  dropout: {distribution: normal, mu: 0.3, sigma: 0.1}
early_terminate: {type: hyperband, s: 2, eta: 3, max_iter: 27}
"""


def test_a_file_of_wandb_is_read_unchanged() -> None:
    spec = read(yaml.safe_load(BAYES))
    assert spec.varying == ("learning_rate", "batch_size", "optimizer.name", "optimizer.momentum")
    assert (spec.method, spec.name, spec.program, spec.run_cap) == ("bayes", "sweepdemo", "train.py", 20)
    assert spec.metric is not None
    assert (spec.metric.name, spec.metric.goal, spec.metric.target) == ("validation_loss", "minimize", 0.01)
    assert spec.pruning is not None
    assert spec.pruning.bands[:4] == (3, 6, 12, 24)
    assert spec.pruning.is_strict
    assert spec.notes == ("project is W&B's, and has no meaning here",)
    assert template(spec.command, spec.program) == (True, ["--fast", "${args}"])


def test_bands_from_above_are_those_of_wandb() -> None:
    spec = read(yaml.safe_load(HYPERBAND))
    assert spec.pruning is not None
    assert spec.pruning.bands == (3, 9)
    bounds = [spec.parameters[0].low, spec.parameters[0].high]
    assert bounds == pytest.approx([1e-4, 0.1], rel=0.01), "they are given as exponents of e"


def changed(**more: Any) -> dict[str, Any]:
    return {"method": "random", "metric": {"name": "loss"}, "parameters": {"x": {"values": [1, 2]}}, **more}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (changed(method="custom"), "method: 'custom' is not supported"),
        (changed(early_terminate={"type": "envelope"}), "early_terminate.type: 'envelope' is not supported"),
        (changed(early_terminate={"type": "hyperband"}), "min_iter or max_iter is missing"),
        (changed(early_terminate={"type": "hyperband", "max_iter": 2, "s": 1}), "too small for eta"),
        (changed(parameter={}), "parameter: not supported here"),
        (changed(imageuri="x"), "imageuri: not supported here"),
        (changed(parameters={}), "a sweep needs at least one"),
        (changed(parameters=None), "parameters: missing"),
        (changed(parameters={"x": 3}), "parameters.x: expected a map"),
        (changed(parameters={"x": {"min": 1}}), "give values, value, or min and max"),
        (changed(parameters={"x": {"min": 3, "max": 2}}), "3 is not less than max"),
        (changed(parameters={"x": {"values": []}}), "expected a list with at least one value"),
        (changed(parameters={"x": {"distribution": "cauchy"}}), "'cauchy' is not supported"),
        (changed(parameters={"x": {"distribution": "log_uniform", "min": 1, "max": 1000}}), "e to the power of 1000"),
        (changed(parameters={"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}), "begins above 0"),
        (changed(parameters={"x": {"distribution": "beta", "a": 1}}), "parameters.x.b: expected a number"),
        (changed(parameters={"x": {"min": True, "max": "b"}}), "parameters.x.min: expected a number"),
        (changed(method="grid", parameters={"x": {"min": 0.0, "max": 1.0}}), "a grid cannot try all values"),
        ({"method": "bayes", "parameters": {"x": {"values": [1]}}}, "metric: method bayes needs one"),
        (changed(run_cap=0), "run_cap: expected a whole number of 1 or more"),
        (changed(command=["${args_json_file}"]), r"\$\{args_json_file\} is not supported"),
        (changed(metric={"goal": "maximize"}), "metric.name: missing"),
        (changed(metric="loss"), "metric: expected a map"),
        (changed(parameters={"x": {"min": 0, "max": 10**400}}), "parameters.x.max: expected a number"),
        (changed(parameters={"x": {"min": 0, "max": 10**18}}), "whole numbers go up to"),
        (changed(parameters={"x": {"distribution": "log_normal", "mu": 2000}}), "too large for numbers"),
        (changed(parameters={"x": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 1e-310}}), "too large"),
        (changed(ugro={"options": {"x": {"1": {"balance": "off"}}}}), "ugro.options.x: nothing for the value '2'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tree)


def test_a_number_that_yaml_takes_for_a_text_is_a_number() -> None:
    spec = read(yaml.safe_load("{method: grid, parameters: {lr: {values: [1e-5, 2e-5]}}}"))
    assert spec.parameters[0].values == (1e-5, 2e-5)


SETTINGS = (("lr", "0.1"), ("amp", "true"), ("deep", "false"), ("opt.name", '"adam"'))


@pytest.mark.parametrize(
    ("macro", "words"),
    [
        ("${args}", ["--lr=0.1", "--amp=True", "--deep=False", "--opt.name=adam"]),
        ("${args_no_boolean_flags}", ["--lr=0.1", "--amp", "--opt.name=adam"]),
        ("${args_no_hyphens}", ["lr=0.1", "amp=True", "deep=False", "opt.name=adam"]),
        ("${args_json}", ['{"lr": 0.1, "amp": true, "deep": false, "opt": {"name": "adam"}}']),
    ],
)
def test_macros_become_the_words_of_a_trial(macro: str, words: list[str]) -> None:
    assert expanded(["run", macro, "end"], SETTINGS) == ["run", *words, "end"]


def test_a_command_of_another_program_is_kept_and_its_variables_are_filled_in() -> None:
    command = check_command(["${env}", "torchrun", "--nproc=2", "${program}", "${args}", "${envvar:DATA}/x"])
    is_script, words = template(command, "train.py")
    assert (is_script, words) == (False, ["torchrun", "--nproc=2", "train.py", "${args}", "${envvar:DATA}/x"])
    assert with_variables(words, {"DATA": "/d"})[-1] == "/d/x"
    with pytest.raises(ConfigError, match="the variable DATA is not set"):
        with_variables(words, {})


def test_a_trial_finds_its_parameters_in_its_environment() -> None:
    found = variables(SETTINGS)
    assert found["UGRO_PARAM_LR"] == "0.1"
    assert found["UGRO_PARAM_OPT_NAME"] == "adam"
    assert nested(SETTINGS) == {"lr": 0.1, "amp": True, "deep": False, "opt": {"name": "adam"}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lr: {values: [1, .nan, 2]}", "parameters.lr.values: expected finite numbers, got nan among them"),
        ("lr: {values: [0.1, 1e999]}", "parameters.lr.values: expected a finite number, got inf"),
        ("lr: {values: [1, nan]}", "parameters.lr.values: expected finite numbers, got 'nan' among them"),
        ("lr: {value: -.inf}", "parameters.lr.value: expected a finite number, got -inf"),
        ("lr: {values: [{warm: [1, .nan]}, {warm: [2]}]}", "parameters.lr.values: expected a finite number, got nan"),
        ("lr: {min: .nan, max: 1}", "parameters.lr.min: expected a number, got nan"),
        ("lr: {mu: .inf}", "parameters.lr.mu: expected a number, got inf"),
        ("lr: {values: [1, 2], probabilities: [.nan, 1]}", "parameters.lr.probabilities: expected a number, got nan"),
        ("lr: {min: 0, max: 1, distribution: q_uniform, q: .nan}", "parameters.lr.q: expected a number, got nan"),
    ],
)
def test_nan_and_infinities_are_no_values(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        read({"method": "random", "parameters": yaml.safe_load(given)})


def test_words_that_look_like_no_numbers_are_values_among_words() -> None:
    values = ["nan", "zero", True]
    assert read({"method": "grid", "parameters": {"fill": {"values": values}}}).parameters[0].values == tuple(values)
