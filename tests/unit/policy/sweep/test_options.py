"""Values of parameters that set options of a job instead of a flag."""

from __future__ import annotations

from typing import Any

import pytest

from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import grid_settings
from ugro.features.sweeps.service.creation import as_counted, check_options, trial_spec
from ugro.kernel.jobs.model import JobSpec, Launcher, Retry
from ugro.kernel.support.errors import ConfigError

BASE = JobSpec("train", ("train.py", "--fast", "${args}"), Launcher.DDP)


def tree(options: Any, **parameters: list[Any]) -> dict[str, Any]:
    searched = {name: {"values": values} for name, values in parameters.items()}
    return {"parameters": searched, "ugro": {"options": options}}


def test_a_value_sets_script_flags_and_options_and_the_other_parameters_are_flags() -> None:
    options = {
        "model": {"gpt": {"script": "gpt.py", "args": ["--layers", "2"]}},
        "mode": {
            "equal": {"balance": "off", "args": ["--x"], "env": {"A": "1"}},
            "2": {"balance": "adaptive", "retry": {"max": 2}},
        },
    }
    spec = read(tree(options, lr=[0.1], model=["gpt"], mode=["equal", 2]))
    check_options(spec.options, BASE)
    first, second = (trial_spec(BASE, "t", grid_settings(spec.parameters, at), spec.options) for at in (0, 1))
    assert first.argv == ("gpt.py", "--fast", "--lr=0.1", "--layers", "2", "--x")
    assert (first.balance, first.retry) == ("off", Retry())
    assert second.argv == ("gpt.py", "--fast", "--lr=0.1", "--layers", "2")
    assert (second.balance, second.retry.max_retries) == ("adaptive", 2)
    assert (dict(first.env)["UGRO_PARAM_MODE"], dict(first.env)["A"]) == ("equal", "1")
    assert "A" not in dict(second.env)


def test_without_options_a_trial_is_as_before() -> None:
    spec = read(tree({}, lr=[0.1]))
    made = trial_spec(BASE, "t", grid_settings(spec.parameters, 0), spec.options)
    assert made.argv == ("train.py", "--fast", "--lr=0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mod": {"a": {}}}, "ugro.options.mod: there is no parameter of this name"),
        ({"mode": {"a": {"balance": "off"}}}, "ugro.options.mode: nothing for the value 'b'"),
        ({"mode": {"a": {}, "b": {}, "c": {}}}, "ugro.options.mode.c: no value of mode"),
        ({"mode": {"a": {}, "b": 1}}, "ugro.options.mode.b: expected a map"),
        ([1], "ugro.options: expected a map"),
        ({"mode": {"a": {"balance": "fast"}, "b": {}}}, "ugro.options.mode.a.balance: expected off, static or"),
        ({"mode": {"a": {"nodes": 3}, "b": {}}}, "ugro.options.mode.a.nodes: cannot differ between trials"),
        ({"mode": {"a": {"env": {"A": None}}, "b": {}}}, "env: every variable needs a value here"),
    ],
)
def test_a_mistake_in_options_is_named(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(read(tree(options, mode=["a", "b"])).options, BASE)
    assert words in str(caught.value)


def test_a_command_has_no_script_to_change() -> None:
    spec = read(tree({"mode": {"a": {"args": ["-x"]}}}, mode=["a"]))
    with pytest.raises(ConfigError, match="the sweep runs a command"):
        check_options(spec.options, JobSpec("x", ("true",), Launcher.COMMAND))


def test_quotas_look_at_each_priority_and_time_limit_that_a_trial_may_have() -> None:
    options = {
        "mode": {"a": {"time_limit": "1h", "env": {"A": "1"}}, "b": {"time_limit": "1h"}, "c": {"time_limit": "2h"}},
        "model": {"x": {"priority": "urgent"}, "y": {}},
    }
    found = as_counted(BASE, read(tree(options, mode=["a", "b", "c"], model=["x", "y"])).options)
    assert {(one.time_limit_s, one.priority) for one in found} == {
        (hours * 3600.0, priority) for hours in (1, 2) for priority in (BASE.priority, 90)
    }
    assert len(found) == 4
    assert as_counted(BASE, {}) == [BASE]
