"""Agents that come and go between two steps of a command: it finds the right one and ends no other."""

from __future__ import annotations

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


def connections() -> list[str]:
    """The names of the agents' sockets that those of this process are connected to."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    found.append(str(one.getpeername()))
    return [name for name in found if "agent.sock" in name]
