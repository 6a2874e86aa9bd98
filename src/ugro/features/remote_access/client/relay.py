"""``ugro relay``: on the master, started by a client's ssh. Carries its connections to the agent's socket.

It connects to the socket of the agent, and to the agent's dashboard on loopback; no other place can be named. What it
may do there is what the account that it runs as may do.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ugro
from ugro.client.http import AgentGone, Connection, NoAgent, account, connected
from ugro.client.launcher import STATUS_S
from ugro.features.remote_access.client.mux import About, Mux
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotAllowed, UgroError, Unreachable, error_from_wire
from ugro.kernel.support.state_dir import SOCKET_VARIABLE, StateDir, chosen_socket
from ugro.node import foreign

# --- banner -----------------------------------------------------------------------------------------------------------
# The first line that a relay says: which protocol and version it speaks, for which account, or why it cannot.
#
# A login shell may print something before it; that is skipped.


PROTOCOL = 1
_MARK = b"UGRO-RELAY "
MOST_BEFORE = 64 * 1024  # bytes that are skipped in search of it
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class Banner:
    version: str
    user: str  # the account there
    host: str


def banner(user: str, host: str, error: UgroError | None = None) -> bytes:
    about: dict[str, Any] = {"protocol": PROTOCOL, "version": ugro.__version__, "user": user, "host": host}
    if error is not None:
        about["error"] = error.to_wire()
    return _MARK + json.dumps(about).encode() + b"\n"


def find_banner(said: bytes) -> tuple[Banner | None, bytes]:
    """The banner, and what follows it; None while its line is not complete. Raises what the relay reports."""
    at = 0
    while (end := said.find(b"\n", at)) >= 0:
        line = said[at:end]
        # What a shell prints may lack a newline at its end.
        if (start := line.find(_MARK)) >= 0:
            return _parsed(line[start + len(_MARK) :]), said[end + 1 :]
        at = end + 1
    return None, said


def _parsed(line: bytes) -> Banner:
    try:
        about = foreign.parsed(line)
        protocol, version = int(about["protocol"]), str(about["version"])[:_MOST_NAME]
        found = Banner(version, str(about["user"])[:_MOST_NAME], str(about["host"])[:_MOST_NAME])
    except (ValueError, KeyError, TypeError) as error:
        raise NotAllowed("the relay there says what this version does not understand") from error
    if isinstance(about.get("error"), dict):
        raise error_from_wire(about["error"])
    if protocol != PROTOCOL:
        raise _unfit(version)
    expect_fitting(version)
    return found


def expect_fitting(there: str) -> None:
    """Raises NotAllowed unless the first two numbers are the same."""
    if there.split(".")[:2] != ugro.__version__.split(".")[:2]:
        raise _unfit(there)


def _unfit(there: str) -> NotAllowed:
    hint = f"install the same version on both: pip install ugro=={there}"
    return NotAllowed(f"ugro {there} there does not fit ugro {ugro.__version__} here", hint=hint)


# --- team -------------------------------------------------------------------------------------------------------------
# The agent of a team: somebody else runs it. A client uses it as it is, and never starts, replaces or stops it.


_SHARED = Path("/tmp")


def team_agent(connection: Connection, path: Path) -> AgentStatus:
    expect_trusted(path)
    try:
        found = decode(AgentStatus, connection.ask("GET", "/v1/agent", timeout_s=STATUS_S))
    except AgentGone as error:
        hint = f"{SOCKET_VARIABLE} names it; does the team's agent run, and are you a member of its group? See: id"
        raise Unreachable(f"no agent answers at {path}", cause=error.cause, hint=hint) from error
    if found.version != ugro.__version__:
        hint = f"install the same: pip install ugro=={found.version}; or ask its owner to update it"
        raise NotAllowed(f"the agent of the team has version {found.version}, this is {ugro.__version__}", hint=hint)
    return found


def expect_trusted(path: Path) -> None:
    """Raises NotAllowed if others than the agent's owner could have put a socket of their own there."""
    try:
        found = path.parent.stat()
    except OSError:
        return  # there is nothing to connect to
    if found.st_mode & stat.S_IWOTH:
        raise NotAllowed(f"everybody can write to {path.parent}", hint="its socket may be anybody's: do not use it")
    name = path.parent.name.removeprefix("ugro-")
    if path.parent.parent == _SHARED and path.parent.name != name and _owner(found.st_uid) not in (name, "root"):
        hint = f"it belongs to {_owner(found.st_uid)}, who may only pretend to be {name}: do not use it"
        raise NotAllowed(f"{path.parent} does not belong to {name}", hint=hint)


def of_its_owner() -> NotAllowed:
    """What only who runs the agent can do."""
    hint = f"for an agent of yours: unset {SOCKET_VARIABLE}"
    return NotAllowed("the agent of the team is run by its owner", hint=hint)


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- relay ------------------------------------------------------------------------------------------------------------


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
