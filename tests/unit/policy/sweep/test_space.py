"""Distributions, grids and ranges of a sweep."""

from __future__ import annotations

import json
import math
import statistics
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import (
    Parameter,
    grid_settings,
    grid_size,
    place_of,
    random_place,
    settings,
    split_arguments,
)
from ugro.kernel.support.errors import UsageError


def parameter(**given: Any) -> Parameter:
    return read({"method": "random", "parameters": {"x": given}}).parameters[0]


def drawn(one: Parameter, count: int = 500) -> list[Any]:
    chance = Random(1)
    return [one.value(random_place([one], chance)["x"]) for _ in range(count)]


@pytest.mark.parametrize(
    ("given", "low", "high", "median"),
    [
        ({"distribution": "log_uniform", "min": -4, "max": 0}, math.exp(-4), 1.0, math.exp(-2)),
        ({"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0}, 1e-4, 1.0, 1e-2),
        ({"distribution": "inv_log_uniform", "min": 0, "max": 4}, math.exp(-4), 1.0, math.exp(-2)),
        ({"distribution": "inv_log_uniform_values", "min": 1e-4, "max": 1.0}, 1e-4, 1.0, 1e-2),
        ({"min": 0.0, "max": 10.0}, 0.0, 10.0, 5.0),
        ({"distribution": "normal", "mu": 3, "sigma": 2}, -9.0, 15.0, 3.0),
        ({"distribution": "log_normal", "mu": 1, "sigma": 0.5}, 0.0, 60.0, math.e),
        ({"distribution": "beta", "a": 2, "b": 2}, 0.0, 1.0, 0.5),
        ({"distribution": "beta", "a": 2, "b": 1}, 0.0, 1.0, math.sqrt(0.5)),
        ({"distribution": "q_log_uniform_values", "min": 16, "max": 256, "q": 8}, 16, 256, 64),
        ({"distribution": "q_normal", "mu": 50, "sigma": 10, "q": 5}, 0, 110, 50),
        ({"min": 2, "max": 8}, 2, 8, 5),
    ],
)
def test_a_distribution_has_its_bounds_and_its_median(
    given: dict[str, Any], low: float, high: float, median: float
) -> None:
    values = drawn(parameter(**given))
    assert low <= min(values)
    assert max(values) <= high
    assert statistics.median(values) == pytest.approx(median, rel=0.15, abs=0.1 * abs(median))


def test_a_step_makes_multiples_and_whole_ones_stay_whole() -> None:
    values = drawn(parameter(distribution="q_uniform", min=0.0, max=1.0, q=0.1), 200)
    assert {round(10 * value, 9) for value in values} <= set(range(11))
    assert {type(value) for value in drawn(parameter(distribution="q_uniform", min=8, max=64, q=8), 50)} == {int}


def test_probabilities_are_respected() -> None:
    values = drawn(parameter(values=["a", "b", "c"], probabilities=[0.7, 0.3, 0]))
    assert 0.6 < values.count("a") / len(values) < 0.8
    assert "c" not in values


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_grid_has_each_point_exactly_once(sizes: list[int]) -> None:
    names = [f"p{number}" for number in range(len(sizes))]
    spec = read({"parameters": {name: {"values": list(range(size))} for name, size in zip(names, sizes, strict=True)}})
    count = grid_size(spec.parameters)
    assert count == math.prod(sizes)
    points = [grid_settings(spec.parameters, number) for number in range(count)]
    assert len(set(points)) == count
    for found in points:
        place = place_of(spec.parameters, found)
        assert place is not None
        assert settings(spec.parameters, place) == found, "a sampler sees the same point"


def test_words_of_the_command_line_become_parameters_or_stay() -> None:
    words = ["data", "--lr", "1e-5,2e-5", "--layers=2..8", "--amp", "--path", "a/../b", "--w", "log:1e-4..1e-1"]
    rest, found = split_arguments([*words, "--d", "0..1.0:0.25", "--opt", "adam,sgd", "--json", '{"a": 1, "b": 2}'])
    assert rest == ["data", "--amp", "--path", "a/../b", "--json", '{"a": 1, "b": 2}']
    assert found == {
        "lr": {"values": [1e-5, 2e-5]},
        "layers": {"distribution": "int_uniform", "min": 2, "max": 8},
        "w": {"distribution": "log_uniform_values", "min": 1e-4, "max": 0.1},
        "d": {"distribution": "q_uniform", "min": 0, "max": 1.0, "q": 0.25},
        "opt": {"values": ["adam", "sgd"]},
    }
    grid = read({"parameters": {"d": found["d"]}}).parameters[0].grid()
    assert grid == (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr", "1e-2..1e-5"], "1e-2 is not less than 1e-5"),
        (["--lr", "log:0..1"], "begins above 0"),
        (["--lr", "log:fast"], "is not a range"),
        (["--lr", "1,,2"], "has an empty value"),
        (["--lr", "1,2", "--lr=3,4"], "given twice"),
        (["--lr", "0..1:0"], "a step is above 0"),
        (["--lr", "log:1..8:2"], "has no step"),
    ],
)
def test_a_wrong_range_is_one_clear_error(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        split_arguments(words)
    assert error.value.hint


def test_a_wide_range_of_whole_numbers_takes_no_memory() -> None:
    """A seed, in many files: all its values would fill the machine."""
    spec = read({"method": "random", "parameters": {"seed": {"min": 0, "max": 2**31 - 1}, "x": {"values": [1, 2]}}})
    assert grid_size(spec.parameters) == 2**32
    assert grid_settings(spec.parameters, 2**32 - 1) == (("seed", str(2**31 - 1)), ("x", "2"))
    assert spec.varying == ("seed", "x")
    steps = parameter(distribution="q_uniform", min=0, max=1e9, q=1e-3)
    assert steps.grid() is None, "nobody tries them all"


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(-9, 9), min_size=1, max_size=4), max_size=5))
def test_settings_are_json_in_the_order_of_the_space(values: dict[str, list[int]]) -> None:
    if not values:
        return
    spec = read({"method": "random", "parameters": {name: {"values": some} for name, some in values.items()}})
    found = settings(spec.parameters, random_place(spec.parameters, Random(2)))
    assert [name for name, _ in found] == list(values)
    assert all(json.loads(text) in values[name] for name, text in found)
