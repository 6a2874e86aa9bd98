"""The agent's process: exactly one, of the right version, found and replaced by any command, gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ugro as package
from tests.integration.conftest import Farms, InProcess, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import is_alive, processes_with_variable, wait_until
from ugro.client.client import Client
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import decode
from ugro.kernel.support.state_dir import StateDir

# Runs the agent or the command line as if it were of another version.
AS_VERSION = """
import sys, ugro
ugro.__version__ = sys.argv.pop(1)
from ugro.{module}.main import main
main()
"""
OLD = "0.0.1"


@pytest.fixture
def inside(ugro: Ugro) -> Ugro:
    """For tests whose commands need no process of their own."""
    return InProcess(ugro.home)


@pytest.fixture(scope="module")
def served() -> Iterator[Ugro]:
    """An agent for several tests, that logs all it can, in a home that it made itself while nothing was forbidden."""
    with commands() as outer:
        found = InProcess(outer.home / "fresh")
        before = os.umask(0)
        try:
            assert found("--log-level", "debug", "agent", "start", cwd=outer.home).returncode == 0
        finally:
            os.umask(before)
        for folder in ("cwd", "user"):
            (found.home / folder).mkdir(exist_ok=True)
        yield found
        assert found("agent", "stop").returncode == 0


def start_agent(ugro: Ugro, *words: str, code: Sequence[str] = ("-m", "ugro.kernel.agent")) -> dict[str, Any]:
    """Starts an agent directly, not by a command; what it says when it is ready, or why it is not."""
    ready, theirs = os.pipe()
    argv = [sys.executable, *code, *words, "--home", str(ugro.home), "--ready-fd", str(theirs)]
    with (ugro.home / "started.err").open("w") as errors:
        process = subprocess.Popen(argv, env=ugro.environment(), pass_fds=[theirs], stderr=errors)
    os.close(theirs)
    with os.fdopen(ready) as answer:
        said: dict[str, Any] = json.loads(answer.readline() or "{}")
    if said.get("state") != "ready":
        process.wait(10)
    said["code"] = process.returncode
    process.returncode = 0  # not ours to wait for; the test ends it by its pid
    return said


def status(ugro: Ugro) -> dict[str, Any]:
    answer = ugro("agent", "status", "--json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)["agent"]
    return found


def log_lines(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "agent.log").read_text().splitlines()]


def agents(ugro: Ugro) -> list[int]:
    return [pid for pid in ugro.processes() if b"ugro.kernel.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# --- one agent -----------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_ten_commands_at_once_start_one_agent_and_all_succeed(ugro: Ugro) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: ugro("agent", "start", "--json"), range(10)))
    assert [answer.stderr for answer in answers if answer.returncode] == []
    found = [json.loads(answer.stdout)["agent"] for answer in answers]
    assert len({agent["pid"] for agent in found}) == 1
    assert {agent["generation"] for agent in found} == {1}
    assert agents(ugro) == [found[0]["pid"]]


def test_a_second_agent_in_the_same_home_says_taken_and_ends_by_itself(served: Ugro) -> None:
    first = status(served)["pid"]
    second = start_agent(served)
    assert (second["state"], second["code"]) == ("taken", 0)
    assert "taken" in (served.home / "started.err").read_text()
    assert status(served)["pid"] == first


@pytest.mark.proof
def test_a_killed_agents_socket_is_in_nobodys_way(ugro: Ugro) -> None:
    assert ugro("health").returncode == 0
    old = status(ugro)
    os.kill(old["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(old["pid"]), what="the agent to end")
    assert (ugro.home / "agent.sock").exists()
    assert ugro("agent", "status").returncode == 5
    assert ugro("health").returncode == 0
    new = status(ugro)
    assert new["pid"] != old["pid"]
    assert new["generation"] == old["generation"] + 1


@pytest.mark.proof
def test_commands_find_their_way_while_the_agent_is_being_stopped(ugro: Ugro) -> None:
    ugro("agent", "start")
    with ThreadPoolExecutor(8) as pool:
        orders = [("agent", "stop"), ("health",), ("agent", "start"), ("health",)] * 2
        answers = list(pool.map(lambda words: ugro(*words), orders))
    failed = [answer.stderr for answer in answers if answer.returncode]
    # A health check may be under way when somebody else stops the agent, and only then may it fail, in these words.
    assert all("the agent ended" in text for text in failed), failed
    assert len(failed) <= 4
    assert ugro("health").returncode == 0


@pytest.mark.proof
def test_a_command_whose_agent_is_stopped_before_it_is_asked_starts_another(
    ugro: Ugro, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ugro.environment().items():
        monkeypatch.setenv(name, value)
    generations: list[int] = []

    class Unlucky(OwnAgent):
        def agent(self) -> AgentStatus:
            found = super().agent()
            generations.append(found.generation)
            if len(generations) % 2:
                assert ugro("agent", "stop").returncode == 0
            return found

    with Client.through(Unlucky(StateDir(ugro.home), OwnWish())) as client:
        assert len(client.health()) == 1
        client.close()
        assert client.jobs.newest() == []
    assert generations == [1, 2, 2, 3]


@pytest.mark.proof
def test_an_agent_whose_starter_was_killed_serves_all_the_same(ugro: Ugro) -> None:
    ready, theirs = os.pipe()
    argv = [sys.executable, "-m", "ugro.kernel.agent", "--home", str(ugro.home), "--ready-fd", str(theirs)]
    with subprocess.Popen(argv, env=ugro.environment(), pass_fds=[theirs]) as agent:
        os.close(theirs)
        os.close(ready)
        wait_until((ugro.home / "agent.sock").exists, 20, "the socket")
        assert status(ugro)["pid"] == agent.pid
        ugro("agent", "stop")
        assert agent.wait(20) == 0


# --- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_an_idle_agent_of_another_version_is_replaced(inside: Ugro) -> None:
    old = start_agent(inside, OLD, code=("-c", AS_VERSION.format(module="kernel.agent")))
    assert status(inside)["version"] == OLD, "looking at it replaces nothing"
    answer = inside("health")
    assert answer.returncode == 0, answer.stderr
    assert not is_alive(old["pid"])
    new = status(inside)
    assert (new["version"], new["generation"]) == (package.__version__, 2)


@pytest.mark.proof
def test_a_busy_agent_of_another_version_is_left_to_its_work(ugro: Ugro, cluster: SshdFarm) -> None:
    start_agent(ugro, OLD, "--cluster", str(ugro.cluster), code=("-c", AS_VERSION.format(module="kernel.agent")))
    script = "echo begun; until [ -e go ]; do sleep 0.02; done; echo done"
    with old_command(ugro, "exec", "n001", "--", "sh", "-c", script) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "n001 | begun\n"
        answer = ugro("health")
        assert answer.returncode == 6
        assert f"the agent has version {OLD}, this is {package.__version__}" in answer.stderr
        assert "1 running command" in answer.stderr
        assert "ugro agent stop" in answer.stderr
        (cluster["n001"].home / "go").touch()
        assert running.stdout.read() == "n001 | done\n"
        assert running.wait(20) == 0
    assert ugro("health").returncode == 0
    assert status(ugro)["version"] == package.__version__


@pytest.mark.proof
def test_a_program_that_is_older_than_what_is_installed_does_not_fight_over_the_agent(ugro: Ugro) -> None:
    with old_command(ugro, "health") as command:
        _, errors = command.communicate(timeout=30)
        assert command.returncode == 6
        assert f"ugro was changed from {OLD} to {package.__version__} while this program ran" in errors
    assert status(ugro)["generation"] == 1


def old_command(ugro: Ugro, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", AS_VERSION.format(module="cli"), OLD, *words]
    return subprocess.Popen(argv, env=ugro.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_agent_that_knows_less_of_itself_is_still_understood() -> None:
    assert decode(AgentStatus, {"pid": 7, "version": OLD, "mood": "fine"}) == AgentStatus(7, OLD)


# --- its files -----------------------------------------------------------------------------------------------------


def test_nobody_else_may_open_what_belongs_to_an_agent(served: Ugro) -> None:
    others = ("cwd", "user", "started.err")  # the test's own
    ours = [entry for entry in served.home.iterdir() if entry.name not in others]
    modes = {entry.name: stat.S_IMODE(entry.lstat().st_mode) for entry in ours if not entry.is_dir()}
    assert stat.S_IMODE(served.home.stat().st_mode) == 0o700
    assert set(modes) >= {"agent.sock", "agent.lock", "agent.log", "agent.err", "state.db"}
    assert {name: mode for name, mode in modes.items() if mode & 0o177} == {}
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in ours if entry.is_dir()} <= {0o700}, "such as its backups"


@pytest.mark.proof
def test_the_home_may_have_a_path_that_no_socket_address_holds(ugro: Ugro) -> None:
    ugro.home = ugro.home / ("a long name " * 12) / "ü"
    (ugro.home / "cwd").mkdir(parents=True)
    assert len(str(ugro.home)) > 108
    assert ugro("health").returncode == 0
    assert status(ugro)["home"] == str(ugro.home)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: an empty state has some 600 KiB, with its log."""
    disk = tmp_path / "disk"
    disk.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    unmount = ["umount", str(disk)]
    wait_until(lambda: subprocess.run(unmount, capture_output=True, check=False).returncode == 0, 10, "an idle disk")


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            return ballast


def broken_homes(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("")
    return {
        str(tmp_path / "file"): "file exists",
        str(tmp_path / "file" / "below"): "not a directory",
        "/proc/ugro": "no such file or directory",
    }


def test_a_home_that_cannot_be_used_is_one_clear_error(ugro: Ugro, tmp_path: Path) -> None:
    for home, reason in broken_homes(tmp_path).items():
        answer = ugro("health", "--json", env={"UGRO_HOME": home})
        assert answer.returncode == 1
        assert answer.stderr == (
            f"error: {home} cannot be used: {reason}\n"
            "hint:  UGRO keeps its state there; UGRO_HOME=DIR chooses another folder\n"
        )
        assert json.loads(answer.stdout)["error"]["kind"] == "failed"


def test_a_full_disk_is_one_clear_error_at_the_start(ugro: Ugro, small_disk: Path) -> None:
    fill(small_disk)
    answer = ugro("health", env={"UGRO_HOME": str(small_disk)})
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"error: {small_disk} cannot be used: no space left on device\n")
    assert processes_with_variable("UGRO_HOME", [str(small_disk)]) == []


@pytest.mark.proof
def test_a_disk_that_fills_up_loses_nothing_that_was_acknowledged(ugro: Ugro, small_disk: Path) -> None:
    env = {"UGRO_HOME": str(small_disk)}
    node = json.loads(ugro("health", "--json", env=env).stdout)["nodes"][0]["name"]
    try:
        assert ugro("node", "drain", node, "--reason", "kept", env=env).returncode == 0
        ballast = fill(small_disk)
        answer = ugro("node", "drain", node, "--reason", "x" * 20_000, env=env)
        assert answer.returncode == 1
        assert "cannot be used: database or disk is full" in answer.stderr
        ballast.unlink()
        assert json.loads(ugro("node", "show", node, "--json", env=env).stdout)["node"]["drained"] == "kept"
        assert ugro("node", "resume", node, env=env).returncode == 0
    finally:
        ugro("agent", "stop", env=env)


# --- its end -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_signal_ends_it_cleanly_with_all_it_started(ugro: Ugro, cluster: SshdFarm) -> None:
    assert ugro("health").returncode == 0
    agent = status(ugro)
    assert (agent["nodes"], agent["nodes_connected"]) == (3, 3)
    assert all(node.sessions() for node in cluster.nodes)
    os.kill(agent["pid"], signal.SIGTERM)
    wait_until(lambda: not is_alive(agent["pid"]), 20, "the agent to end")
    assert not (ugro.home / "agent.sock").exists()
    wait_until(lambda: not ugro.processes(), 10, "its children to end")
    wait_until(lambda: not any(node.processes() for node in cluster.nodes), 10, "the node programs to end")
    assert log_lines(ugro.home)[-1]["message"] == "agent stopped"


@pytest.mark.proof
def test_stopping_it_ends_the_commands_it_runs_and_tells_them(ugro: Ugro, farm_of: Farms) -> None:
    cluster = farm_of(1)
    ugro.cluster = cluster.cluster_yaml()
    script = "trap 'echo told; exit 3' TERM; echo begun; while :; do sleep 0.02; done"
    with ugro.start("exec", "n001", "--", "sh", "-c", script) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"n001 | begun\n"
        assert ugro("agent", "stop").returncode == 0
        assert running.wait(20) == 3  # as it ended itself when it was told
    wait_until(lambda: not cluster["n001"].processes(), 10, "everything on the node to end")


# --- its commands --------------------------------------------------------------------------------------------------


def test_start_status_and_stop_say_what_there_is(inside: Ugro) -> None:
    missing = inside("agent", "status", "--json")
    assert (missing.returncode, json.loads(missing.stdout)) == (5, {"agent": None})
    assert inside("agent", "stop").stderr == "no agent was running\n"
    assert json.loads(inside("agent", "stop", "--json").stdout) == {"stopped": False}
    started = inside("agent", "start")
    assert started.stdout.startswith(f"agent {package.__version__}, pid {status(inside)['pid']}, since ")
    assert "this machine (no cluster file)" in started.stdout
    assert json.loads(inside("agent", "stop", "--json").stdout) == {"stopped": True}
    assert inside("agent", "status").returncode == 5


@pytest.mark.proof
def test_the_agent_can_be_stopped_when_its_cluster_file_is_gone(ugro: Ugro, tmp_path: Path) -> None:
    ugro.cluster = tmp_path / "cluster.yaml"
    ugro.cluster.write_text("nodes: {here: {transport: local}}\n")
    assert ugro("agent", "start").returncode == 0
    ugro.cluster.unlink()
    assert ugro("agent", "status").returncode == 0
    assert ugro("agent", "stop").stderr == "the agent has stopped\n"


@pytest.mark.proof
def test_logs_show_the_last_lines_and_follow_also_into_a_new_file(ugro: Ugro) -> None:
    missing = ugro("agent", "logs")
    assert (missing.returncode, missing.stdout) == (4, "")
    assert "there is no log" in missing.stderr
    ugro("agent", "start")
    ugro("agent", "stop")
    last = ugro("agent", "logs", "-n", "2").stdout.splitlines()
    assert [json.loads(line)["message"] for line in last][-1] == "agent stopped"
    assert len(last) == 2
    log = ugro.home / "agent.log"
    with ugro.start("agent", "logs", "-f", "-n", "1") as follower:
        assert follower.stdout is not None
        assert b"agent stopped" in follower.stdout.readline()
        for number, where in enumerate(["a", "a", "b"]):
            if where == "b":
                log.rename(ugro.home / "agent.log.1")
            with log.open("a") as file:
                file.write(f"line {number}\n")
            assert follower.stdout.readline() == b"line %d\n" % number
        follower.send_signal(signal.SIGINT)
        assert follower.wait(10) == 130
        assert follower.stderr is not None
        assert follower.stderr.read().strip() == b""


def test_the_log_is_json_and_holds_no_secret(served: Ugro) -> None:
    secret = "hunter2-never-logged"
    answer = served("exec", "@all", "--env", f"TOKEN={secret}", "--", "sh", "-c", "echo $TOKEN")
    assert secret in answer.stdout
    bad = {"key": "k", "nodes": ["@all"], "argv": ["true"], "env": {"TOKEN": [secret]}}
    assert ask_raw(served.home, "/v1/exec", bad).startswith(b"HTTP/1.1 400")
    assert ask_raw(served.home, "/v1/exec", {"argv": [secret]}).startswith(b"HTTP/1.1 400")
    lines = log_lines(served.home)
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert "debug" in {line["level"] for line in lines}
    assert any(line.get("node") and line["message"] == "connected" for line in lines)
    for file in filter(Path.is_file, served.home.glob("agent.*")):
        assert secret not in file.read_text(errors="replace")


def ask_raw(home: Path, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(home / "agent.sock"))
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + content)
        return connection.recv(65536)


def test_a_full_log_is_rotated_and_old_ones_go(tmp_path: Path) -> None:
    code = """
import logging, os, sys
from pathlib import Path
from ugro.kernel.agent.main import configure
os.umask(0o077)
configure(Path(sys.argv[1]), "info", max_bytes=2000)
for number in range(200):
    logging.getLogger("ugro.test").info("line %d of many", number, extra={"node": "gpu1", "cause": None})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("ugro.test").exception("oops")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "agent.log")], check=True, timeout=30)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["agent.log", "agent.log.1", "agent.log.2", "agent.log.3"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    ordinary = next(line for line in lines if line["message"] == "line 199 of many")
    assert (ordinary["level"], ordinary["logger"], ordinary["node"]) == ("info", "ugro.test", "gpu1")
    assert "cause" not in ordinary
    assert "ZeroDivisionError" in next(line for line in lines if line["message"] == "oops")["traceback"]


@pytest.mark.proof
def test_an_install_without_the_pages_dependencies_runs_jobs_all_the_same(ugro: Ugro, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no jinja2 here')\n")
    hidden = {"PYTHONPATH": str(tmp_path)}
    assert ugro("run", "--", "true", env=hidden).returncode == 0
    refused = ugro("dashboard", "--no-open", env=hidden)
    assert refused.returncode != 0
    assert "no jinja2 here" in refused.stderr
    assert "hint:" in refused.stderr
