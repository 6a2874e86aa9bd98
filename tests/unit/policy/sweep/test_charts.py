"""What a sweep's charts get: axes as they were declared, and each trial's place on them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.policy.sweep.test_page import REPORT, TRIALS
from ugro.features.sweeps.model import Scale, Trial, TrialState
from ugro.features.sweeps.rules.page import MOST_TRIALS, document
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import scales

SPACE = {
    "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
    "layers": {"min": 2, "max": 8},
    "dropout": {"distribution": "q_uniform", "min": 0.0, "max": 0.5, "q": 0.1},
    "opt": {"values": ["sgd", "adam"]},
    "size": {"values": [64, 8, 16]},
    "noise": {"distribution": "normal", "mu": 0.0, "sigma": 1.0},
    "gain": {"distribution": "log_normal", "mu": 0.0, "sigma": 1.0},
    "mix": {"distribution": "beta", "a": 2, "b": 2},
    "seed": {"value": 3},
}


def test_each_distribution_has_its_axis() -> None:
    found = {one.name: one for one in scales(read({"method": "random", "parameters": SPACE}))}
    assert found["lr"] == Scale("lr", "float", is_log=True, low=1e-5, high=1e-1)
    assert found["layers"] == Scale("layers", "int", low=2, high=8)
    assert found["dropout"] == Scale("dropout", "float", low=0.0, high=0.5)
    assert found["opt"] == Scale("opt", "choice", values=('"sgd"', '"adam"')), "in the order of the file"
    assert found["size"] == Scale("size", "choice", values=("8", "16", "64")), "numbers by size"
    assert (found["noise"].low, found["noise"].is_log) == (None, False)
    assert (found["gain"].high, found["gain"].is_log) == (None, True)
    assert (found["mix"].low, found["mix"].high) == (0.0, 1.0)
    assert "seed" not in found, "it does not vary"


def test_a_trial_has_the_number_of_a_choice_and_the_value_of_a_number() -> None:
    axes = (Scale("lr", "float", is_log=True, low=1e-6, high=1.0), Scale("opt", "choice", values=('"sgd"', '"<b>"')))
    found = document(replace(REPORT, scales=axes), has_jobs=True)
    assert found["axes"][0] == {"name": "lr", "kind": "float", "log": True, "low": 1e-6, "high": 1.0}
    assert found["axes"][1] == {"name": "opt", "kind": "choice", "values": ["sgd", "<b>"]}
    assert found["trials"][1] == [2, 2, "complete", 0.5, [0.01, 1]]
    assert (found["best"], found["metric"], found["left_out"], found["is_over"]) == (4, "val/loss", 0, True)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1e-4", "0.5"], {"kind": "float", "log": True, "low": 1e-4, "high": 0.5}),
        (["1", "3"], {"kind": "int", "log": False, "low": 1.0, "high": 3.0}),
        (["true", "1", "null"], {"kind": "choice", "values": ["true", "1"]}),
        (["[1, 2]", '"a"'], {"kind": "choice", "values": ["[1, 2]", "a"]}),
        (["null"], {"kind": "choice", "values": []}),
    ],
)
def test_an_axis_that_was_not_declared_is_made_of_its_values(values: list[str], expected: dict[str, object]) -> None:
    trials = tuple(Trial(number, (("p", text),)) for number, text in enumerate(values, start=1))
    found = document(replace(REPORT, parameters=("p",), trials=trials, best=None), has_jobs=False)
    assert found["axes"] == [{"name": "p", **expected}]
    assert [trial[4][0] is None for trial in found["trials"]] == [text == "null" for text in values]


def test_values_beyond_what_was_declared_have_a_place() -> None:
    axes = (Scale("lr", "float", low=0.0, high=0.05), Scale("opt", "choice", values=('"sgd"',)))
    found = document(replace(REPORT, scales=axes), has_jobs=False)
    assert found["axes"][0]["high"] == 0.1
    assert found["axes"][1]["values"] == ["sgd", "<b>"]


def test_of_very_many_trials_the_newest_and_the_best_are_shown() -> None:
    many = tuple(replace(TRIALS[0], number=number) for number in range(1, MOST_TRIALS + 101))
    found = document(replace(REPORT, trials=many, best=7), has_jobs=True)
    assert found["trials"][0][0] == 7
    assert (len(found["trials"]), found["left_out"]) == (MOST_TRIALS + 1, 99)


def test_a_value_that_is_no_number_is_no_value() -> None:
    odd = replace(TRIALS[0], best=float("nan"), state=TrialState.FAILED)
    assert document(replace(REPORT, trials=(odd,), best=None), has_jobs=True)["trials"][0][2:4] == ["failed", None]
