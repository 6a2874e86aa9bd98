"""Agents that come and go between two steps of a command: it finds the right one and ends no other."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import AS_VERSION, OLD, ask_raw, start_agent, status
from tests.integration.conftest import Ugro
from tests.rig.waiting import is_alive, wait_until
from ugro.client.client import Client
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.state_dir import StateDir


@pytest.fixture
def ours(ugro: Ugro, monkeypatch: pytest.MonkeyPatch) -> Ugro:
    """For clients in this process: agents that they start belong to the test."""
    for name, value in ugro.environment().items():
        monkeypatch.setenv(name, value)
    return ugro


@pytest.mark.proof
def test_a_stream_whose_agent_dies_before_it_reads_the_request_asks_another(ours: Ugro) -> None:
    with Client(home=ours.home) as client, ThreadPoolExecutor(1) as pool:
        first = client.agent()
        os.kill(first.pid, signal.SIGSTOP)
        asked = pool.submit(client.health)
        wait_until(lambda: len(connections()) == 2, what="the request to be on its way")
        os.kill(first.pid, signal.SIGKILL)
        assert len(asked.result(30)) == 1
        assert client.agent().generation == first.generation + 1


@pytest.mark.proof
def test_a_command_whose_agent_is_stopped_before_it_is_given_the_cluster_starts_another(ours: Ugro) -> None:
    assert ours("agent", "start").returncode == 0
    file = ours.home / "cluster.yaml"
    file.write_text("nodes: {here: {transport: local}}\n")
    reach = StoppedOnce(StateDir(ours.home), OwnWish(file))
    reach.ugro = ours
    with Client.through(reach) as client:
        assert client.agent().cluster_file == str(file)


class StoppedOnce(OwnAgent):
    """Somebody stops the agent as soon as this client has seen it."""

    ugro: Ugro | None = None

    def running_agent(self) -> AgentStatus | None:
        found = super().running_agent()
        if self.ugro is not None:
            assert self.ugro("agent", "stop").returncode == 0
            self.ugro = None
        return found


@pytest.mark.proof
def test_a_command_that_finds_an_agent_still_loading_waits_for_it(ugro: Ugro, tmp_path: Path) -> None:
    hold_up_the_load(tmp_path)
    assert ugro("agent", "start").returncode == 0
    os.kill(agent_pid(ugro), signal.SIGKILL)  # its socket is left
    with ugro.start("agent", "start", env={"PYTHONPATH": str(tmp_path)}) as first:
        wait_until((tmp_path / "loading").exists, 20, "the agent to load")
        with Client(home=ugro.home) as client:
            assert client.running_agent() is None, "nobody may wait for an agent that cannot answer yet"
        with ugro.start("agent", "start") as second:
            (tmp_path / "go").touch()
            said = [command.communicate(timeout=30) for command in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert said[0][0] == said[1][0], "both found the same agent"


def hold_up_the_load(folder: Path) -> None:
    """With this folder on its path an agent does not get beyond loading its API before there is a file ``go``."""
    lines = [
        "import pathlib, sys, time",
        "folder = pathlib.Path(__file__).parent",
        "(folder / 'loading').touch()",
        "while not (folder / 'go').exists():",
        "    time.sleep(0.01)",
        "sys.path.remove(str(folder))",
        "del sys.modules['uvicorn']",
        "import uvicorn",
    ]
    (folder / "uvicorn.py").write_text("\n".join(lines))


def agent_pid(ugro: Ugro) -> int:
    return int(json.loads((ugro.home / "agent.lock").read_text())["pid"])


@pytest.mark.proof
def test_stopping_is_done_when_the_agent_that_was_asked_is_gone(ugro: Ugro) -> None:
    assert ugro("agent", "start").returncode == 0
    old = agent_pid(ugro)
    with half_a_request(ugro), ugro.start("agent", "stop") as stopper:
        wait_until(lambda: not is_listening(ugro), what="the agent to be asked")
        os.kill(stopper.pid, signal.SIGSTOP)  # until another command has started the next agent
        wait_until(lambda: not is_alive(old), 20, "the agent to end")
        assert ugro("agent", "start").returncode == 0
        os.kill(stopper.pid, signal.SIGCONT)
        _, said = stopper.communicate(timeout=30)
    assert (stopper.returncode, said) == (0, b"the agent has stopped\n")
    assert is_alive(agent_pid(ugro))


def half_a_request(ugro: Ugro) -> socket.socket:
    """An agent that ends waits a while for the rest of it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(ugro.home / "agent.sock"))
    connection.sendall(b"POST /v1/nodes HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    return connection


def is_listening(ugro: Ugro) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(ugro.home / "agent.sock"))
        return True
    return False


@pytest.mark.proof
def test_a_right_agent_that_replaced_the_old_one_meanwhile_is_not_stopped(ours: Ugro) -> None:
    old = start_agent(ours, OLD, code=("-c", AS_VERSION.format(module="kernel.agent")))
    found: list[int] = []

    def replace_it_first(what: str) -> None:
        if not found:
            assert "replacing" in what
            assert ours("health").returncode == 0
            found.append(agent_pid(ours))

    with Client(home=ours.home, on_wait=replace_it_first) as client:
        assert [client.agent().pid] == found
    assert found != [old["pid"]]


def test_an_agent_that_is_not_meant_does_not_stop(ugro: Ugro) -> None:
    assert ugro("agent", "start").returncode == 0
    pid = agent_pid(ugro)
    assert ask_raw(ugro.home, f"/v1/agent/stop?pid={pid + 1}", {}).startswith(b"HTTP/1.1 404")
    assert status(ugro)["pid"] == pid
    assert ask_raw(ugro.home, "/v1/agent/stop?mood=fine", {}).startswith(b"HTTP/1.1 400")
    assert status(ugro)["pid"] == pid, "a word that the agent does not know could have kept it"


def connections() -> list[str]:
    """The names of the agents' sockets that those of this process are connected to."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    found.append(str(one.getpeername()))
    return [name for name in found if "agent.sock" in name]
