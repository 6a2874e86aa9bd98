"""``ugro node setup`` and ``ugro env`` as a user has them: real sshds, the real uv, small packages of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Completed, Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import processes_with_variable, wait_until
from tests.rig.wheels import wheel


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of one package, and another that needs it."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "ugro-probe-core", "1.0")
    wheel(folder, "ugro-probe-core", "2.0")
    wheel(folder, "ugro-probe-app", "0.1", requires=["ugro-probe-core"])
    wheel(folder, "six", "0.0.1")  # an index has newer ones
    return folder


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.fixture(scope="module")
def shared(farm: SshdFarm, packages: Path) -> Iterator[Ugro]:
    environment = {"packages": ["ugro-probe-app"], "find_links": [str(packages)], "no_index": True}
    nodes = {"n002": {"labels": ["old"]}}
    with commands(farm.cluster_yaml(environment=environment, nodes=nodes)) as ugro:
        yield ugro


@pytest.fixture
def ugro(shared: Ugro) -> Iterator[Ugro]:
    """Nothing of an earlier test is left on its nodes."""
    yield shared
    assert shared("env", "gc", "--all").returncode == 0


def set_up(ugro: Ugro, *words: str, code: int = 0) -> dict[str, Any]:
    done = ugro("node", "setup", "--json", *words, timeout=120)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kept(ugro: Ugro) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ugro("env", "ls", "--json").stdout)["environments"]
    return found


def job_file(ugro: Ugro, **environment: Any) -> str:
    path = ugro.home / "cwd" / "job.yaml"
    path.write_text(yaml.safe_dump({"command": "sleep 600", "environment": environment}))
    return str(path)


def test_without_an_environment_the_table_shows_what_the_nodes_have(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    nodes = [f"  n{n}: {{transport: local, remote_root: {tmp_path}/{n}}}\n" for n in (1, 2)]
    file.write_text("".join(["nodes:\n", *nodes]))
    with commands(file) as ugro:
        done = ugro("node", "setup", "n1")
        assert done.returncode == 0, done.stderr
        assert "no environment is configured" in done.stderr
        header, row = (line.split("\t") for line in done.stdout.splitlines())
        assert header[:2] == ["node", "python"]
        assert row[0] == "n1"
        assert row[1].startswith("3."), row
        document = json.loads(ugro("node", "setup", "--json").stdout)
        assert document["environment"] is None
        assert [(one["node"], one["error"]) for one in document["nodes"]] == [("n1", None), ("n2", None)]
        none = ugro("env", "ls")
        assert (none.returncode, none.stdout) == (0, ""), none.stderr
        assert "no environments" in none.stderr
        assert ugro("env", "show", "abc").returncode == 4
        assert ugro("node", "setup", "nobody").returncode == 4


@pytest.mark.proof
def test_it_is_made_on_all_nodes_and_the_second_time_nothing_is(ugro: Ugro, farm: SshdFarm) -> None:
    done = ugro("node", "setup", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "n001: installing" in done.stderr, "plain lines where there is no terminal"
    [one] = kept(ugro)
    assert [held["node"] for held in one["nodes"]] == ["n001", "n002"]
    assert dict(one["packages"])["ugro-probe-core"] == "2.0"
    again = set_up(ugro)
    assert [(row["environment"], row["seconds"]) for row in again["nodes"]] == [(one["name"], None)] * 2
    shown = ugro("env", "show", one["name"][:6])
    assert "ugro-probe-app\t0.1" in shown.stdout
    removed = ugro("env", "rm", one["name"][:6], "n001")
    assert removed.returncode == 0, removed.stderr
    assert [held["node"] for held in kept(ugro)[0]["nodes"]] == ["n002"]
    assert [row["seconds"] is None for row in set_up(ugro)["nodes"]] == [False, True], "only what lacks is made"
    home = [path.name for path in farm["n001"].home.iterdir()]
    assert home == ["grid_workspace"]


@pytest.mark.proof
def test_a_node_that_is_down_does_not_hold_up_the_others(ugro: Ugro, farm: SshdFarm) -> None:
    farm["n001"].stop()
    try:
        found = set_up(ugro, code=5)
    finally:
        farm["n001"].start()
    down, up = found["nodes"]
    assert (down["is_unreachable"], down["error"] is None) == (True, False)
    assert (up["error"], up["environment"] is None) == (None, False)
    wait_until(lambda: ugro("health").returncode == 0, 30, "n001 to be back")


@pytest.mark.proof
def test_a_package_that_does_not_exist_is_one_clear_error_and_leaves_nothing(ugro: Ugro) -> None:
    done = ugro("node", "setup", "--package", "ugro-probe-core==9.9", timeout=120)
    assert done.returncode == 1
    assert "9.9" in done.stderr
    assert "Traceback" not in done.stderr
    assert kept(ugro) == []


@pytest.mark.proof
def test_without_an_index_nothing_else_than_the_named_folders_counts(ugro: Ugro, packages: Path) -> None:
    set_up(ugro, "n001", "-f", job_file(ugro, packages=["six"], find_links=[str(packages)], no_index=True))
    assert [one["packages"] for one in kept(ugro)] == [[["six", "0.0.1"]]]


@pytest.mark.proof
def test_an_override_by_label_is_said_with_who_got_what(ugro: Ugro, packages: Path) -> None:
    file = job_file(
        ugro,
        packages=["ugro-probe-core==2.0"],
        find_links=[str(packages)],
        no_index=True,
        overrides={"old": {"packages": ["ugro-probe-core==1.0"]}},
    )
    found = set_up(ugro, "-f", file)
    assert [(row["label"], row["differs"]) for row in found["nodes"]] == [("", []), ("old", ["ugro-probe-core"])]
    assert "ugro-probe-core (n001 2.0, n002 1.0)" in found["findings"][-1]["text"]


@pytest.mark.proof
def test_an_environment_that_exists_is_checked_and_whoever_lacks_it_is_named(ugro: Ugro, farm: SshdFarm) -> None:
    there = farm["n001"].home / "env"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(there)], check=True)
    found = set_up(ugro, "-f", job_file(ugro, existing="~/env"), code=1)
    assert "nodes" in found, found
    has, lacks = found["nodes"]
    assert (has["error"], has["python_path"]) == (None, str(there / "bin" / "python"))
    assert "~/env" in lacks["error"] or str(farm["n002"].home) in lacks["error"]
    refused = ugro("launch", "-f", job_file(ugro, existing="~/env"), "--label", "old")
    assert refused.returncode == 1
    assert "n002" in refused.stderr


@pytest.mark.proof
def test_what_a_running_job_uses_is_not_removed(ugro: Ugro, packages: Path) -> None:
    file = job_file(ugro, packages=["ugro-probe-core"], find_links=[str(packages)], no_index=True)
    started = ugro("launch", "-d", "-f", file)
    assert started.returncode == 0, started.stderr
    try:
        wait_until(lambda: _state(ugro) == "running", 120, "the job to run")
        [one] = [env for env in kept(ugro) if any(held["runs"] for held in env["nodes"])]
        refused = ugro("env", "rm", one["name"])
        assert (refused.returncode, "a running job uses it" in refused.stdout) == (1, True), refused.stdout
        [told, *_] = json.loads(ugro("env", "rm", one["name"], "--json").stdout)["nodes"]
        assert told["kept_bytes"] is None, "nobody measured it"
        assert ugro("env", "gc", "--all").returncode == 0
        assert one["name"] in [env["name"] for env in kept(ugro)]
    finally:
        ugro("cancel", "last")
        ugro("wait", "last")


@pytest.mark.proof
def test_a_new_environment_takes_the_place_of_the_one_that_was_not_used_for_longest(
    ugro: Ugro, farm: SshdFarm, packages: Path
) -> None:
    def with_core(version: str) -> str:
        core = f"ugro-probe-core=={version}"
        return job_file(ugro, packages=[core], find_links=[str(packages)], no_index=True)

    file = Path(str(ugro.cluster))
    before = file.read_text()
    set_up(ugro, "n001", "-f", with_core("1.0"))
    [old] = kept(ugro)
    folder = farm["n001"].home / "grid_workspace" / ".ugro" / "environments" / old["name"]
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    file.write_text(before + "environments: {max_size: 1KB}\n")
    try:
        set_up(ugro, "n001", "-f", with_core("2.0"))
        wait_until(lambda: old["name"] not in [one["name"] for one in kept(ugro)], 30, "the old one to go")
        assert len(kept(ugro)) == 1, "the new one stays, whatever the limit is"
    finally:
        file.write_text(before)


@pytest.mark.proof
def test_a_password_of_an_index_is_taken_from_the_environment_and_shown_nowhere(ugro: Ugro) -> None:
    file = job_file(ugro, packages=["ugro-probe-core"], index_url="http://ann:${PROBE_PASSWORD}@127.0.0.1:9/simple")
    lacking = ugro("node", "setup", "-f", file)
    assert lacking.returncode == 2
    assert "PROBE_PASSWORD" in lacking.stderr
    refused = ugro("node", "setup", "-f", file, env={"PROBE_PASSWORD": "hunter2"})
    assert refused.returncode == 1, refused.stderr
    assert "127.0.0.1:9" in refused.stderr
    seen = [refused.stdout, refused.stderr, ugro("audit").stdout, (ugro.home / "agent.log").read_text()]
    assert not any("hunter2" in text for text in seen)


@pytest.mark.proof
def test_ctrl_c_ends_it_and_everything_that_it_started(ugro: Ugro) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        file = job_file(ugro, packages=["ugro-probe-core"], index_url=address)
        command = ugro.start("node", "setup", "-f", file)
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            command.send_signal(signal.SIGINT)
            _, said = command.communicate(timeout=30)
        assert command.returncode == 130, said
        assert b"interrupted" in said
        assert b"Traceback" not in said
    wait_until(lambda: not _installers(ugro), 20, "the installer to be gone")


def _installers(ugro: Ugro) -> list[str]:
    commands = []
    for pid in processes_with_variable("UGRO_HOME", [str(ugro.home)]):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode())
        except OSError:
            continue
    return [command for command in commands if Path(command).name.startswith("uv")]


def _state(ugro: Ugro) -> str:
    answer: Completed = ugro("status", "last", "--json")
    return str(json.loads(answer.stdout)["job"]["state"])
