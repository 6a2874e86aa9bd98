"""A member of a team on the agent's own machine: somebody else's account runs the agent, and reads none of their files.

So files are sent and results are fetched as from another machine, over the team's socket instead of ssh.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import ugro
from ugro.client.account import account
from ugro.client.http import AgentGone, connected
from ugro.client.reach import Say
from ugro.client.remote.agent import RemoteAgent
from ugro.client.remote.banner import Banner
from ugro.client.remote.master import Master
from ugro.client.remote.relay import AGENT
from ugro.client.stopping import STATUS_S
from ugro.client.team import of_its_owner, team_agent
from ugro.core.agent import AgentStatus
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import StateDir


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


class TeamAgent(RemoteAgent):
    is_elsewhere = False

    def __init__(self, path: Path, home: StateDir, *, on_wait: Say | None = None) -> None:
        self._path = path
        super().__init__(TeamLink(path), home, on_wait=on_wait)

    def twin(self) -> TeamAgent:
        return TeamAgent(self._path, self.home)

    def agent(self) -> AgentStatus:
        return team_agent(self._connection, self._path)

    def running_agent(self) -> AgentStatus | None:
        try:
            return decode(AgentStatus, self._connection.ask("GET", "/v1/agent", timeout_s=STATUS_S))
        except AgentGone:
            return None

    def own(self, what: str) -> NoReturn:
        raise of_its_owner()
