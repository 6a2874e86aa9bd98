"""The agent of a team: somebody else runs it. A client uses it as it is, and never starts, replaces or stops it."""

from __future__ import annotations

import pwd
import stat
from pathlib import Path

import ugro
from ugro.client.http import AgentGone, Connection
from ugro.client.stopping import STATUS_S
from ugro.core.agent import AgentStatus
from ugro.core.errors import NotAllowed, Unreachable
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import SOCKET_VARIABLE

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
