"""The cluster file while the agent runs: edits are taken up, broken ones are only reported, and there is one file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until


def status(ugro: Ugro) -> dict[str, Any]:
    answer = ugro("agent", "status", "--json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)["agent"]
    return found


def write(ugro: Ugro, text: str) -> None:
    """As an editor does: another file, put in its place."""
    assert ugro.cluster is not None
    descriptor, name = tempfile.mkstemp(dir=ugro.cluster.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(name, ugro.cluster)


def names(ugro: Ugro) -> list[str]:
    return [node["name"] for node in json.loads(ugro("health", "--json").stdout)["nodes"]]


def sessions(farm: SshdFarm) -> dict[str, list[int]]:
    return {node.name: node.sessions() for node in farm.nodes}


@pytest.mark.proof
def test_edits_are_taken_up_within_two_seconds_and_touch_no_other_link(ugro: Ugro, cluster: SshdFarm) -> None:
    assert ugro.cluster is not None
    full = ugro.cluster.read_text()
    [entry] = [line for line in full.splitlines() if "n003" in line and line.endswith(":")]
    without = full.split(entry)[0]
    write(ugro, without)
    assert names(ugro) == ["n001", "n002"]
    before, pid = sessions(cluster), status(ugro)["pid"]
    assert before["n001"]
    assert before["n003"] == []

    write(ugro, full)
    wait_until(lambda: status(ugro)["nodes"] == 3, 2, "the new node")
    assert names(ugro) == ["n001", "n002", "n003"]
    added = sessions(cluster)
    assert (added["n001"], added["n002"]) == (before["n001"], before["n002"])

    write(ugro, full.replace("  n002:\n", f"  n002:\n    port: {cluster['n002'].port}\n"))
    wait_until(lambda: sessions(cluster)["n002"] != before["n002"], 3, "the changed node to be dialled again")
    assert names(ugro) == ["n001", "n002", "n003"]
    changed = sessions(cluster)
    assert (changed["n001"], changed["n003"]) == (added["n001"], added["n003"])
    assert not set(changed["n002"]) & set(before["n002"])

    write(ugro, without)
    wait_until(lambda: status(ugro)["nodes"] == 2, 2, "the node to be gone")
    wait_until(lambda: not cluster["n003"].processes(), 5, "its node program to end")
    assert sessions(cluster)["n001"] == before["n001"]
    assert status(ugro)["pid"] == pid


def local_cluster(ugro: Ugro, folder: Path, *nodes: str) -> str:
    folder.mkdir(exist_ok=True)
    ugro.cluster = folder / "cluster.yaml"
    text = "nodes:\n" + "".join(
        f"  {name}: {{transport: local, remote_root: {folder / name}}}\n" for name in nodes or ("one", "two")
    )
    ugro.cluster.write_text(text)
    return text


@pytest.mark.proof
def test_a_broken_edit_is_reported_by_every_command_and_changes_nothing(ugro: Ugro, tmp_path: Path) -> None:
    good = local_cluster(ugro, tmp_path)
    assert names(ugro) == ["one", "two"]
    write(ugro, good.replace("  two", "  three").replace("transport", "trnsport", 1))
    wait_until(lambda: status(ugro)["config_error"], 2, "the error to be noticed")
    message = f"{ugro.cluster}:2: nodes.one.trnsport: unknown key"
    for words in (("health",), ("node", "ls"), ("exec", "@all", "--", "true"), ("agent", "start"), ("agent", "status")):
        answer = ugro(*words)
        assert answer.returncode == 0
        assert answer.stderr.count(f"warning: {message}") == 1, answer.stderr
        assert "the last valid configuration stays in use" in answer.stderr
        assert "hint:  did you mean transport?" in answer.stderr
    assert names(ugro) == ["one", "two"]
    assert status(ugro)["config_error"] == message
    write(ugro, good.replace("  two", "  three"))
    wait_until(lambda: status(ugro)["config_error"] is None, 2, "the error to be gone")
    assert names(ugro) == ["one", "three"]
    assert "warning" not in ugro("health").stderr


@pytest.mark.proof
def test_a_deleted_file_is_reported_and_its_nodes_stay(ugro: Ugro, tmp_path: Path) -> None:
    good = local_cluster(ugro, tmp_path)
    file, ugro.cluster = ugro.cluster, None
    assert file is not None
    assert ugro("--cluster", str(file), "health").returncode == 0
    file.unlink()
    wait_until(lambda: status(ugro)["config_error"], 2, "the loss to be noticed")
    answer = ugro("health")
    assert answer.returncode == 0
    assert f"warning: {file}: cannot be read: no such file" in answer.stderr
    assert [line.split("\t")[0] for line in answer.stdout.splitlines()[1:]] == ["one", "two"]
    named = ugro("--cluster", str(file), "health")
    assert (named.returncode, named.stdout) == (2, "")
    assert f"{file}: no such cluster file" in named.stderr
    file.write_text(good)
    wait_until(lambda: status(ugro)["config_error"] is None, 2, "the error to be gone")


@pytest.mark.proof
def test_a_broken_file_at_the_first_start_leaves_no_agent(ugro: Ugro, tmp_path: Path) -> None:
    local_cluster(ugro, tmp_path)
    write(ugro, "nodes: [one]\nssh:\n  timeout: soon\n")
    for words in (("health",), ("agent", "start"), ("exec", "@all", "--", "true")):
        answer = ugro(*words)
        assert answer.returncode == 2
        assert answer.stderr.startswith(f"error: {ugro.cluster}:3: ssh.timeout: expected ")
        assert answer.stderr.count("\n") == 2
        assert ugro.processes() == []
    assert not (ugro.home / "agent.sock").exists()


@pytest.mark.proof
def test_one_agent_serves_one_cluster_file_however_it_is_spelt(ugro: Ugro, tmp_path: Path) -> None:
    local_cluster(ugro, tmp_path / "other")
    local_cluster(ugro, tmp_path / "first")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    assert ugro("health").returncode == 0
    for spelling in ("first/../first/cluster.yaml", "link/cluster.yaml"):
        same = ugro("health", env={"UGRO_CLUSTER": str(tmp_path / spelling)})
        assert same.returncode == 0, same.stderr
    ugro.cluster = None
    relative = ugro("--cluster", "../first/cluster.yaml", "health", cwd=tmp_path / "other")
    assert relative.returncode == 0, relative.stderr
    refused = ugro("health", cwd=tmp_path / "other")
    assert refused.returncode == 6
    assert f"uses {tmp_path}/first/cluster.yaml, not {tmp_path}/other/cluster.yaml" in refused.stderr
    assert "ugro agent stop" in refused.stderr
    assert ugro("health", cwd=tmp_path).returncode == 0, "a folder without a file takes the agent as it is"


@pytest.mark.proof
def test_an_agent_without_a_file_takes_up_the_first_that_it_is_shown(ugro: Ugro, tmp_path: Path) -> None:
    assert ugro("health", cwd=tmp_path).returncode == 0
    before = status(ugro)
    assert before["cluster_file"] is None
    local_cluster(ugro, tmp_path)
    ugro.cluster = None
    assert ugro("allow", "--yes", cwd=tmp_path).returncode == 0
    answer = ugro("health", cwd=tmp_path)
    assert [line.split("\t")[0] for line in answer.stdout.splitlines()[1:]] == ["one", "two"]
    after = status(ugro)
    assert (after["pid"], after["cluster_file"]) == (before["pid"], str(tmp_path / "cluster.yaml"))
