"""Which cluster a command uses, wherever it is typed; and that it says when it is not what one would expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.agent import end_agent

ALONE = "there is no cluster file, so this machine alone is used; to use others: ugro init"


@pytest.fixture
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


def project(ugro: Ugro, name: str, node: str) -> Path:
    """A folder with a cluster file and a folder below, in the user's home."""
    folder = ugro.home / "user" / name
    (folder / "src").mkdir(parents=True)
    (folder / "cluster.yaml").write_text(f"nodes: {{{node}: {{transport: local, remote_root: {folder / 'root'}}}}}\n")
    return folder


def allowed(ugro: Ugro, folder: Path) -> Path:
    assert ugro("allow", "--yes", str(folder / "cluster.yaml")).returncode == 0
    return folder


def nodes(ugro: Ugro, cwd: Path, *options: str) -> list[str]:
    answer = ugro(*options, "health", "--json", cwd=cwd)
    assert answer.returncode == 0, answer.stderr
    return [str(one["name"]) for one in json.loads(answer.stdout)["nodes"]]


@pytest.mark.proof
def test_the_cluster_does_not_depend_on_the_folder_below_it_nor_on_a_crash(ugro: Ugro) -> None:
    ours, elsewhere = allowed(ugro, project(ugro, "ours", "a1")), ugro.home / "user" / "other"
    elsewhere.mkdir()
    assert nodes(ugro, ours / "src") == ["a1"]
    assert nodes(ugro, elsewhere) == ["a1"], "a folder without a file uses the running agent's cluster"
    end_agent(ugro.home)
    assert nodes(ugro, elsewhere) == ["a1"], "and so does the agent that follows a killed one"
    ran = ugro("run", "true", cwd=elsewhere)
    assert (ran.returncode, ALONE in ran.stderr) == (0, False)
    theirs = allowed(ugro, project(ugro, "theirs", "b1"))
    refused = ugro("health", cwd=theirs / "src")
    assert refused.returncode == 6
    assert f"uses {ours}/cluster.yaml, not {theirs}/cluster.yaml" in refused.stderr
    assert nodes(ugro, theirs, "--cluster", str(ours / "cluster.yaml")) == ["a1"], "as its hint says"
    assert ugro("agent", "stop").returncode == 0
    assert nodes(ugro, theirs / "src") == ["b1"]


def test_who_is_left_with_this_machine_alone_is_told_so(ugro: Ugro) -> None:
    for words in (("health",), ("run", "true"), ("exec", "@all", "--", "true")):
        answer = ugro(*words)
        assert answer.returncode == 0, answer.stderr
        assert answer.stderr.count(f"note: {ALONE}\n") == 1, words
    assert ALONE not in ugro("status").stderr, "a list of jobs is not about nodes"
    assert ALONE not in ugro("--quiet", "health").stderr
    document = ugro("run", "--json", "true")
    assert (document.stderr, list(json.loads(document.stdout))) == (f"warning: {ALONE}\n", ["job"])
    (ugro.home / "cluster.yaml").write_text("nodes: {me: {transport: local}}\n")
    assert ALONE not in ugro("health").stderr, "who has a file means it"


@pytest.mark.proof
def test_the_file_of_another_program_is_named_as_that(ugro: Ugro) -> None:
    (ugro.home / "cwd" / "cluster.yaml").write_text("cluster_name: default\nprovider: {type: aws}\n")
    for words in (("health",), ("launch", "train.py")):
        answer = ugro(*words)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert 'cluster.yaml: not a cluster file of UGRO: it has no nodes, but "cluster_name"' in answer.stderr
        assert "name yours: ugro --cluster FILE" in answer.stderr


@pytest.mark.proof
def test_a_setting_that_the_agent_does_not_use_is_named_without_its_value(ugro: Ugro) -> None:
    assert ugro("agent", "start").returncode == 0
    other = {"UGRO_SSH_TIMEOUT": "7", "UGRO_DEBUG": "1"}
    said = ugro("events", env=other).stderr
    assert said == (
        "note: the agent was started with another value of UGRO_SSH_TIMEOUT; to apply yours: ugro agent restart\n"
    )
    assert ugro("events", env={"UGRO_SSH_TIMEOUT": ""}).stderr == "", "empty is as good as not set"
    assert ugro("agent", "restart", env=other).returncode == 0
    assert ugro("events", env=other).stderr == ""
    assert "another value of UGRO_SSH_TIMEOUT" in ugro("events").stderr


@pytest.mark.proof
def test_a_restarted_agent_serves_the_same_file_from_any_folder(ugro: Ugro) -> None:
    ours = allowed(ugro, project(ugro, "ours", "a1"))
    assert nodes(ugro, ours) == ["a1"]
    pid = json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"]
    again = json.loads(ugro("agent", "restart", "--json").stdout)["agent"]
    assert (again["cluster_file"], again["pid"] == pid) == (str(ours / "cluster.yaml"), False)
    assert ugro("agent", "restart", env={"UGRO_SSH_TIMEOUT": "soon"}).returncode == 2
    assert nodes(ugro, ugro.home / "cwd") == ["a1"], "also after a restart that failed"
