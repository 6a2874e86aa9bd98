"""A member of a team on the agent's own machine: somebody else's account runs the agent, and reads none of their files.

So files are sent and results are fetched as from another machine, over the team's socket instead of ssh.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import ugro
from ugro.client.client import Client
from ugro.client.http import connected
from ugro.client.remote.banner import Banner
from ugro.client.remote.client import RemoteClient
from ugro.client.remote.master import Master
from ugro.client.remote.relay import AGENT, account
from ugro.client.team import expect_own, team_agent
from ugro.core.agent import AgentStatus


class TeamLink:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.master = Master(socket.gethostname())

    def open(self, to: str = AGENT) -> socket.socket:
        return connected(self.path)

    @property
    def banner(self) -> Banner:
        return Banner(ugro.__version__, account(), str(self.master))

    def close(self) -> None:
        """Each connection is closed by who opened it."""


class TeamClient(RemoteClient):
    is_elsewhere = False

    def __init__(self, path: Path, *, on_wait: Callable[[str], None] | None = None) -> None:
        self._path = path
        super().__init__(TeamLink(path), on_wait=on_wait)

    def twin(self) -> TeamClient:
        return TeamClient(self._path)

    def agent(self) -> AgentStatus:
        return team_agent(self._connection, self._path)

    def running_agent(self) -> AgentStatus | None:
        return Client.running_agent(self)

    def _refuse(self, what: str) -> NoReturn:
        expect_own(self._path)
        raise AssertionError("the socket is a team's")
