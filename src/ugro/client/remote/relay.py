"""``ugro relay``: on the master, started by a client's ssh. Carries its connections to the agent's socket.

It connects to the socket of the agent, and to the agent's dashboard on loopback; no other place can be named. What it
may do there is what the account that it runs as may do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import ugro
from ugro.client.account import account
from ugro.client.http import AgentGone, Connection, NoAgent, connected
from ugro.client.remote.banner import banner
from ugro.client.remote.mux import About, Mux
from ugro.client.stopping import STATUS_S
from ugro.client.team import expect_trusted, team_agent
from ugro.core.agent import AgentStatus
from ugro.core.errors import NotAllowed, UgroError, Unreachable
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import StateDir, chosen_socket

AGENT, DASHBOARD = "agent", "dashboard"
_LINK_S = 25.0
_CONNECT_S = 5.0


def agent_socket(named: Path | None, env: Mapping[str, str], default: Path) -> tuple[Path, bool]:
    """The socket of the agent, and whether that is the account's own agent, which is started if it does not run."""
    if named is not None:
        return named, False
    chosen = chosen_socket(env)
    return (chosen, False) if chosen is not None else (default, True)


class Relay:
    def __init__(self, home: StateDir, start: Callable[[], None], named: Path | None = None) -> None:
        """``start``: starts the agent of ``home``. ``named``: the socket of another one."""
        self._start = start
        self._socket, self._is_own = agent_socket(named, os.environ, home.socket)
        self._dashboard: tuple[str, int] | None = None

    def run(self, read_fd: int, write_fd: int) -> None:
        """Until the client is gone."""
        try:
            self._expect_agent()
        except UgroError as error:
            _say(write_fd, banner(account(), socket.gethostname(), error))
            return
        _say(write_fd, banner(account(), socket.gethostname()))
        Mux(read_fd, write_fd, opener=self._open).run()

    def _expect_agent(self) -> None:
        """Of our version: as on this machine, the account's own is replaced if it is idle, and no other one is used."""
        connection = Connection(self._socket)
        try:
            if not self._is_own:
                team_agent(connection, self._socket)
            elif _version(connection) != ugro.__version__:
                self._start()
        finally:
            connection.close()

    def _open(self, about: About) -> socket.socket:
        to = about.get("to")
        if to == AGENT:
            return self._connect_agent()
        if to == DASHBOARD:
            return self._connect_dashboard()
        raise NotAllowed(f"the relay does not connect to {str(to)[:60]!r}")

    def _connect_agent(self) -> socket.socket:
        if not self._is_own:
            return self._named_socket()
        try:
            return connected(self._socket)
        except NoAgent:
            self._start()
            return connected(self._socket)

    def _named_socket(self) -> socket.socket:
        expect_trusted(self._socket)
        try:
            return connected(self._socket)
        except NoAgent as error:
            hint = f"is its agent running, and may {account()} use it?"
            raise Unreachable(f"no agent listens on {self._socket}", hint=hint) from error

    def _connect_dashboard(self) -> socket.socket:
        if self._dashboard is None:
            self._dashboard = self._find_dashboard()
        try:
            return socket.create_connection(self._dashboard, timeout=_CONNECT_S)
        except OSError as error:
            self._dashboard = None  # it may have moved with its agent
            raise Unreachable(f"the dashboard does not answer: {error}", hint="see there: ugro agent logs") from error

    def _find_dashboard(self) -> tuple[str, int]:
        """The agent knows its address: a client cannot name another one."""
        connection = Connection(self._socket)
        try:
            link = connection.ask("POST", "/v1/dashboard", timeout_s=_LINK_S)
        finally:
            connection.close()
        found = urlsplit(str(link["url"]))
        return found.hostname or "127.0.0.1", found.port or (443 if found.scheme == "https" else 80)


def _version(connection: Connection) -> str | None:
    """None: no agent runs."""
    try:
        return decode(AgentStatus, connection.ask("GET", "/v1/agent", timeout_s=STATUS_S)).version
    except AgentGone:
        return None


def _say(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
