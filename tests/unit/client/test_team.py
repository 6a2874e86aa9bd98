"""A member's command uses the team's agent as it is, and no socket that somebody else may have put there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ugro import Client
from ugro.client.http import Connection
from ugro.client.reach import OwnAgent
from ugro.features.remote_access.client.agent import TeamAgent
from ugro.features.remote_access.client.master import Master, remember
from ugro.features.remote_access.client.relay import expect_trusted, team_agent
from ugro.kernel.support.errors import NotAllowed, Unreachable
from ugro.kernel.support.state_dir import StateDir, chosen_socket, team_socket


def test_where_the_socket_of_a_team_is() -> None:
    def place(configured: str | None = None, *, is_root: bool = False, **env: str) -> str:
        return str(team_socket(env, owner="ann", is_root=is_root, configured=configured))

    assert place() == "/tmp/ugro-ann/agent.sock"
    assert place(is_root=True) == "/run/ugro/agent.sock"
    assert place(RUNTIME_DIRECTORY="/run/gpu:/run/x") == "/run/gpu/agent.sock"
    assert place("/srv/u/a.sock", is_root=True, RUNTIME_DIRECTORY="/run/gpu") == "/srv/u/a.sock"


def test_a_client_uses_the_socket_that_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chosen_socket({}) is None
    monkeypatch.setenv("UGRO_SOCKET", str(tmp_path / "team" / "agent.sock"))
    client = Client()
    assert isinstance(client.reach, TeamAgent)
    with pytest.raises(Unreachable, match=r"no agent answers at .*/team/agent.sock"):
        client.agent()
    for refused in (client.stop_agent, client.restart_agent, lambda: client.backups, lambda: client.stores):
        with pytest.raises(NotAllowed, match="run by its owner"):
            refused()
    assert isinstance(client.twin().reach, TeamAgent)
    assert isinstance(Client(home=tmp_path).reach, OwnAgent), "a folder that is named counts"


def test_a_client_uses_the_master_that_commands_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UGRO_HOME", str(tmp_path))
    monkeypatch.delenv("UGRO_MASTER", raising=False)
    assert isinstance(Client().reach, OwnAgent)
    remember(StateDir(tmp_path), Master("ann@gpu-master"))
    client = Client()
    assert str(client.master) == "ann@gpu-master"
    assert client.is_elsewhere
    with pytest.raises(NotAllowed, match="stopping the agent works on ann@gpu-master alone"):
        client.stop_agent()
    with pytest.raises(NotAllowed, match="is a file of this machine, and the agent of ann@gpu-master is used"):
        Client(cluster="cluster.yaml")
    monkeypatch.setenv("UGRO_MASTER", "bob@other")
    assert str(Client().master) == "bob@other"
    assert str(Client().twin().master) == "bob@other"
    monkeypatch.setenv("UGRO_MASTER", "local")
    assert isinstance(Client().reach, OwnAgent)
    monkeypatch.setenv("UGRO_MASTER", "bob@other")
    assert Client(home=tmp_path).master is None


def test_there_is_no_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with pytest.raises(Unreachable, match="no agent answers at"):
        team_agent(Connection(path), path)


def test_a_folder_that_is_anybodys_is_not_trusted(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(NotAllowed, match="everybody can write"):
        expect_trusted(open_to_all / "agent.sock")
    expect_trusted(tmp_path / "agent.sock")
    expect_trusted(tmp_path / "missing" / "agent.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="root can give a folder away")
def test_a_folder_in_tmp_belongs_to_the_one_it_is_named_after(tmp_path: Path) -> None:
    folder = Path(f"/tmp/ugro-nobody-{os.getpid()}")
    folder.mkdir(mode=0o750)
    try:
        os.chown(folder, 1, 1)
        with pytest.raises(NotAllowed, match="does not belong to nobody-"):
            expect_trusted(folder / "agent.sock")
    finally:
        folder.rmdir()
