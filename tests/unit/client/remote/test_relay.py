"""What a relay connects to: an agent of its version, and no socket that somebody else may have put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ugro
from tests.rig.pretend_agent import pretend_agent
from ugro.features.remote_access.client.relay import Relay, find_banner
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, Unreachable
from ugro.kernel.support.state_dir import StateDir


@dataclass
class Agent:
    version: str = ugro.__version__

    def answer(self, path: str, body: str) -> bytes:
        return dumps(AgentStatus(os.getpid(), self.version)).encode()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.delenv("UGRO_SOCKET", raising=False)
    (tmp_path / "team").mkdir()
    return StateDir(tmp_path)


@pytest.fixture
def agent(home: StateDir) -> Iterator[Agent]:
    """At the account's own socket, and at one of a team."""
    found = Agent()
    with pretend_agent(home.socket, found.answer):
        (home.path / "team" / "s").symlink_to(home.socket)
        yield found


def started(home: StateDir, named: Path | None = None) -> int:
    """How often the relay starts, or replaces, the agent. Raises what it says instead of its banner."""
    starts: list[None] = []
    nothing, end = os.pipe()
    os.close(end)
    out, into = os.pipe()
    try:
        Relay(home, lambda: starts.append(None), named).run(nothing, into)
        find_banner(os.read(out, 65536))
    finally:
        for fd in (nothing, out, into):
            os.close(fd)
    return len(starts)


def test_an_agent_of_its_version_is_used(home: StateDir, agent: Agent) -> None:
    assert started(home) == 0
    assert started(home, home.path / "team" / "s") == 0


def test_the_accounts_own_agent_is_started_and_replaced_as_by_a_command(home: StateDir, agent: Agent) -> None:
    agent.version = "0.0.1"
    assert started(home) == 1
    assert started(StateDir(home.path / "other")) == 1


def test_anothers_agent_of_another_version_is_not_used(home: StateDir, agent: Agent) -> None:
    agent.version = "0.0.1"
    with pytest.raises(NotAllowed, match=r"has version 0\.0\.1, this is"):
        started(home, home.path / "team" / "s")
    with pytest.raises(Unreachable, match="no agent answers"):
        started(home, home.path / "team" / "missing")


def test_a_named_socket_in_a_folder_of_everybody_is_not_used(
    home: StateDir, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.path / "team").chmod(0o777)
    monkeypatch.setenv("UGRO_SOCKET", str(home.path / "team" / "s"))
    with pytest.raises(NotAllowed, match="everybody can write"):
        started(home)
