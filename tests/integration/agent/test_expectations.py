"""What a user takes for granted: an edit counts at once, a hung agent can be ended, an end is reported as it was."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.rig.waiting import is_alive, processes_with, wait_until
from ugro.client.client import Client, Ended
from ugro.features.exec.operations import EndCommand
from ugro.kernel.support.errors import ConfigError, UsageError


def write_cluster(folder: Path, *names: str) -> None:
    nodes = "".join(f"  {name}: {{transport: local, remote_root: {folder}/{name}}}\n" for name in names)
    (folder / "cluster.yaml").write_text(f"nodes:\n{nodes}")


def names_of(ugro: Ugro, folder: Path) -> list[str]:
    assert ugro("allow", "--yes", cwd=folder).returncode == 0
    answer = ugro("node", "ls", "--json", cwd=folder)
    return [node["name"] for node in json.loads(answer.stdout)["nodes"]]


@pytest.mark.proof
def test_a_command_right_after_an_edit_means_the_edited_file(ugro: Ugro, tmp_path: Path) -> None:
    write_cluster(tmp_path, "a", "b")
    assert names_of(ugro, tmp_path) == ["a", "b"]
    for names in (["a", "b", "c"], ["a"], ["a", "d"]):
        write_cluster(tmp_path, *names)
        assert names_of(ugro, tmp_path) == names


def test_a_broken_edit_is_told_by_the_very_next_command_and_so_is_its_mending(ugro: Ugro, tmp_path: Path) -> None:
    write_cluster(tmp_path, "a")
    assert names_of(ugro, tmp_path) == ["a"]
    (tmp_path / "cluster.yaml").write_text("nodes: [a\n")
    assert "cluster.yaml" in ugro("node", "ls", cwd=tmp_path).stderr
    write_cluster(tmp_path, "a")
    assert "warning" not in ugro("node", "ls", cwd=tmp_path).stderr


@pytest.mark.proof
def test_agent_stop_also_ends_an_agent_that_hangs(ugro: Ugro, tmp_path: Path) -> None:
    write_cluster(tmp_path, "a")
    assert ugro("allow", "--yes", cwd=tmp_path).returncode == 0
    pid = json.loads(ugro("agent", "start", "--json", cwd=tmp_path).stdout)["agent"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = ugro("agent", "stop", cwd=tmp_path, timeout=60)
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: not is_alive(pid), 5, "the agent to be gone")
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert names_of(ugro, tmp_path) == ["a"]


@pytest.mark.proof
def test_a_command_that_ignored_sigterm_is_reported_as_killed(ugro: Ugro, tmp_path: Path) -> None:
    write_cluster(tmp_path, "a")
    with Client(home=ugro.home, cluster=str(tmp_path / "cluster.yaml")) as client:
        marker = f"stubborn-{os.getpid()}"
        script = f"trap '' TERM INT; echo {marker}; while :; do sleep 1; done"
        events = client.exec(["a"], ["sh", "-c", script], key=marker)
        next(events)
        threading.Timer(0.1, client.twin().ask, [EndCommand(marker)]).start()
        ended = [event for event in events if isinstance(event, Ended)]
    assert [(end.code, end.signal) for end in ended] == [(None, signal.SIGKILL)]
    wait_until(lambda: not processes_with(script.encode()), 5, "its processes to be gone")


def test_the_python_api_takes_texts_as_paths_and_refuses_a_text_as_a_list(ugro: Ugro, tmp_path: Path) -> None:
    with pytest.raises(ConfigError), Client(home=str(ugro.home), cluster="/no/such/cluster.yaml") as client:
        client.agent()
    write_cluster(tmp_path, "a")
    with Client(home=str(ugro.home), cluster=str(tmp_path / "cluster.yaml")) as client:
        with pytest.raises(UsageError):
            next(client.exec("@all", ["true"]))
        with pytest.raises(UsageError):
            next(client.exec(["@all"], "true"))
