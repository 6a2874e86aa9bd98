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

from tests.integration.conftest import Ugro
from tests.rig.waiting import wait_until
from ugro.client import Client
from ugro.core.agent import AgentStatus


@pytest.fixture
def ours(ugro: Ugro, monkeypatch: pytest.MonkeyPatch) -> Ugro:
    """For clients in this process: agents that they start belong to the test."""
    for name, value in ugro.environment().items():
        monkeypatch.setenv(name, value)
    return ugro


def test_a_stream_whose_agent_dies_before_it_reads_the_request_asks_another(ours: Ugro) -> None:
    with Client(home=ours.home) as client, ThreadPoolExecutor(1) as pool:
        first = client.agent()
        os.kill(first.pid, signal.SIGSTOP)
        asked = pool.submit(client.health)
        wait_until(lambda: len(connections()) == 2, what="the request to be on its way")
        os.kill(first.pid, signal.SIGKILL)
        assert len(asked.result(30)) == 1
        assert client.agent().generation == first.generation + 1


def test_a_command_whose_agent_is_stopped_before_it_is_given_the_cluster_starts_another(ours: Ugro) -> None:
    assert ours("agent", "start").returncode == 0
    file = ours.home / "cluster.yaml"
    file.write_text("nodes: {here: {transport: local}}\n")
    with StoppedOnce(home=ours.home, cluster=file) as client:
        client.ugro = ours
        assert client.agent().cluster_file == str(file)


class StoppedOnce(Client):
    """Somebody stops the agent as soon as this client has seen it."""

    ugro: Ugro | None = None

    def running_agent(self) -> AgentStatus | None:
        found = super().running_agent()
        if self.ugro is not None:
            assert self.ugro("agent", "stop").returncode == 0
            self.ugro = None
        return found


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


def connections() -> list[str]:
    """The names of the agents' sockets that those of this process are connected to."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    found.append(str(one.getpeername()))
    return [name for name in found if "agent.sock" in name]
