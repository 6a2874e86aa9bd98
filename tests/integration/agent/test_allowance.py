"""A cluster file that came with a repository: nothing in it is executed before its user has allowed it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.agent import end_agent
from tests.rig.terminal import Screen
from ugro.client.client import Client
from ugro.kernel.support.errors import Unallowed


@pytest.fixture
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


def cloned(ugro: Ugro, marker: str = "pwned") -> Path:
    """A folder of the user with a file that somebody else wrote."""
    folder = ugro.home / "user" / "repository"
    folder.mkdir(exist_ok=True)
    write(folder, marker)
    return folder


def write(folder: Path, marker: str, more: str = "") -> None:
    """As git does: another file, put in its place."""
    command = f"[sh, -c, 'touch {folder / marker}; exec \"$@\"', sh]"
    new = folder / "new"
    new.write_text(f"nodes: {{theirs: {{transport: {command}, remote_root: {folder / 'root'}}}}}\n{more}")
    os.replace(new, folder / "cluster.yaml")


def status(ugro: Ugro) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("agent", "status", "--json").stdout)["agent"]
    return found


def test_a_cloned_file_runs_nothing_until_it_is_allowed(ugro: Ugro, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cloned(ugro)
    hint = f"hint:  see all that it does, and allow it: ugro allow {folder}/cluster.yaml\n"
    for words in (("status",), ("run", "true"), ("agent", "start"), ("allow",)):
        refused = ugro(*words, cwd=folder)
        assert (refused.returncode, refused.stdout) == (2, ""), words
        assert refused.stderr.count("error: ") == 1
        assert "touch" in refused.stderr, "what it would run is shown"
        assert (hint in refused.stderr) == (words != ("allow",))
    assert ugro("agent", "status", cwd=folder).returncode == 5, "no agent was left"
    monkeypatch.chdir(folder)
    with pytest.raises(Unallowed), Client(home=ugro.home) as client:
        client.agent()
    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    assert not (folder / "pwned").exists(), "allowing runs nothing yet"
    assert ugro("health", cwd=folder).returncode == 0
    assert (folder / "pwned").exists()
    assert ugro("deny", cwd=folder).returncode == 0
    assert ugro("agent", "stop").returncode == 0
    assert ugro("status", cwd=folder).returncode == 2


def test_no_module_of_a_cloned_repository_is_loaded(ugro: Ugro) -> None:
    folder = cloned(ugro)
    (folder / "json.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')\n")
    listed = ugro("agent", "restore", "--list", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    assert not (folder / "pwned").exists()


@pytest.mark.proof
def test_an_edit_of_what_is_executed_waits_for_the_user_also_over_restarts(ugro: Ugro) -> None:
    folder = cloned(ugro, "first")
    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    assert ugro("health", cwd=folder).returncode == 0
    pid = status(ugro)["pid"]
    write(folder, "first", "cluster: {name: renamed}\nalerts: {repeat: 60}\n")
    assert "warning" not in ugro("health", cwd=folder).stderr
    assert status(ugro)["cluster_name"] == "renamed", "names and limits need no allowance"

    write(folder, "second", "cluster: {name: pulled}\n")
    for cwd in (folder, ugro.home / "cwd"):
        answer = ugro("health", cwd=cwd)
        assert answer.returncode == 0
        assert f"warning: {folder}/cluster.yaml: the edit is not used until you allow it: + node th" in answer.stderr
    assert status(ugro)["cluster_name"] == "renamed"
    for words in (("node", "add", "more", "--host", "127.0.0.1"), ("node", "rm", "theirs"), ("agent", "restart")):
        refused = ugro(*words, cwd=folder)
        assert (refused.returncode, "until you allow it" in refused.stderr) == (2, True), words
    assert status(ugro)["pid"] == pid, "an agent that could not start again is not stopped"
    end_agent(ugro.home)
    for cwd in (folder, ugro.home / "cwd"):
        assert ugro("health", cwd=cwd).returncode == 2, "the agent that follows a killed one asks, too"
    assert not (folder / "second").exists()

    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    assert ugro("health", cwd=folder).returncode == 0
    assert (folder / "second").exists()
    write(folder, "third")
    assert "until you allow it" in ugro("health", cwd=folder).stderr
    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    assert (status(ugro)["config_error"], "warning" in ugro("health", cwd=folder).stderr) == (None, False)
    assert (folder / "third").exists(), "a running agent applies it at once"


@pytest.mark.proof
def test_what_the_user_writes_or_names_needs_no_allowance(ugro: Ugro) -> None:
    folder = cloned(ugro)
    assert ugro("--cluster", "cluster.yaml", "health", cwd=folder).returncode == 0
    assert ugro("agent", "stop").returncode == 0
    own = ugro.home / "user" / "own"
    own.mkdir()
    assert ugro("init", "--here", cwd=own).returncode == 0
    assert ugro("health", cwd=own).returncode == 0
    assert ugro("node", "add", "second", "--host", "127.0.0.1", "--port", "1", cwd=own).returncode == 5
    assert status(ugro)["config_error"] is None
    assert ugro("agent", "restart", cwd=own).returncode == 0
    assert ugro("init", "--accept-new", "me@127.0.0.1:2", cwd=own).returncode == 0
    assert "warning" not in ugro("health", cwd=own).stderr
    assert status(ugro)["nodes"] == 3


@pytest.mark.proof
def test_ssh_uses_the_configuration_that_was_allowed_and_no_later_one(ugro: Ugro) -> None:
    folder = ugro.home / "user" / "repository"
    folder.mkdir()
    ssh_config = folder / "ssh_config"
    proxy = "Host theirs\n  ProxyCommand touch {}\n"
    ssh_config.write_text(proxy.format(folder / "first"))
    (folder / "cluster.yaml").write_text(f"nodes: [theirs]\nssh: {{config_file: {ssh_config}, max_retries: 0}}\n")
    assert ugro("init", "theirs", cwd=folder).returncode == 2, "its ssh configuration is not used for that either"
    assert not (folder / "first").exists()
    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    assert ugro("health", cwd=folder).returncode == 5
    assert (folder / "first").exists()
    (folder / "first").unlink()
    ssh_config.write_text(proxy.format(folder / "second"))
    assert "+ ssh configuration: ProxyCommand touch" in ugro("health", cwd=folder).stderr
    assert ugro("node", "trust", "theirs", cwd=folder).returncode != 0, "it dials at once"
    assert (folder / "first").exists()
    assert not (folder / "second").exists()


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux draws the terminal, and is not installed")
def test_on_a_terminal_the_user_is_shown_what_would_run_and_asked(ugro: Ugro, tmp_path: Path) -> None:
    folder = cloned(ugro)
    screen = Screen(ugro, tmp_path, 200, 30)
    try:
        screen.type(f"cd {folder}; ugro health; echo ended $?")
        screen.wait_for(r"node theirs: runs this command on this machine: \[sh, .*\n(.*\n)*Allow it\? \[y/N\]")
        screen.press("Enter")
        screen.wait_for("ended 2")
        assert not (folder / "pwned").exists()
        screen.type("clear; ugro health; echo ended $?")
        screen.wait_for("Allow it")
        screen.type("y")
        screen.wait_for("ended 0")
        assert (folder / "pwned").exists()
    finally:
        screen.close()


@pytest.mark.proof
def test_a_repository_is_what_git_makes_of_it(ugro: Ugro, tmp_path: Path) -> None:
    """The whole way: clone, look, pull."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]

    def run(*words: str, cwd: Path) -> None:
        subprocess.run([*git, *words], cwd=cwd, check=True, capture_output=True, timeout=30)

    theirs, mine = cloned(ugro, "one"), ugro.home / "user" / "mine"
    run("init", "-q", cwd=theirs)
    run("add", "cluster.yaml", cwd=theirs)
    run("commit", "-qm", "a cluster", cwd=theirs)
    run("clone", "-q", str(theirs), str(mine), cwd=tmp_path)
    assert ugro("status", cwd=mine).returncode == 2
    assert ugro("allow", "--yes", cwd=mine).returncode == 0
    assert ugro("health", cwd=mine).returncode == 0
    write(theirs, "two")
    run("commit", "-qam", "another command", cwd=theirs)
    run("pull", "-q", cwd=mine)
    assert "until you allow it" in ugro("status", cwd=mine).stderr
    assert ((theirs / "one").exists(), (theirs / "two").exists()) == (True, False)
