"""Each feature can be left out: the rest starts, and runs a job."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Ugro
from tests.rig.tiers import sample
from ugro.features import NAMES
from ugro.kernel.feature import WITHOUT, installed


@pytest.mark.parametrize("name", sample(NAMES, "sweeps", "power"))
def test_a_feature_is_left_out_and_the_rest_runs_a_job(ugro: Ugro, name: str) -> None:
    env = {WITHOUT: name}
    run = ugro("run", "--no-sync", "--cwd", "/", "--", "echo", "hello", env=env)
    assert (run.returncode, run.stdout) == (0, "hello\n"), run.stderr
    status = ugro("status", "last", "--json", env=env)
    assert json.loads(status.stdout)["job"]["state"] == "succeeded"
    for words in (("why", "last"), ("logs", "last"), ("results", "last"), ("node", "ls"), ("health",)):
        assert ugro(*words, env=env).returncode == 0, words
    [feature] = [one for one in installed() if one.name == name]
    for command in feature.commands:
        gone = ugro(*command.split(), "--help", env=env)
        assert gone.returncode == 2, command
        assert "no such command" in gone.stderr


def test_a_feature_that_there_is_not_cannot_be_left_out(ugro: Ugro) -> None:
    refused = ugro("sweep", "ls", env={WITHOUT: "sweping"})
    assert refused.returncode == 2
    assert "there is no feature sweping" in refused.stderr
    assert "sweeps" in refused.stderr
