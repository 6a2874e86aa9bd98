"""Stops an agent and waits for its end; also one that hangs."""

from __future__ import annotations

import time

from ugro.client.http import AgentGone, Connection
from ugro.client.launcher import is_held_by, is_locked, kill_hung_agent, last_holder
from ugro.core.errors import NotFound, Unreachable
from ugro.core.support.state_dir import StateDir

STATUS_S = 10.0  # an agent that takes longer to answer hangs
_END_S = 15.0


def end_agent(home: StateDir, connection: Connection, *, only_if_idle: bool = False) -> bool:
    """False if none ran."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        if stop(home, connection, last_holder(home), only_if_idle=only_if_idle):
            return True
        if not is_locked(home):
            connection.close()
            return False
        time.sleep(0.02)
    raise Unreachable("the agent does not stop", hint=holder_hint(home))


def stop(home: StateDir, connection: Connection, pid: int | None, *, only_if_idle: bool) -> bool:
    """Stops the agent with this pid and no other; False if it could not be asked."""
    if not _ask_to_stop(home, connection, pid, only_if_idle=only_if_idle):
        return False
    deadline = time.monotonic() + _END_S
    while is_held_by(home, pid):
        if time.monotonic() > deadline:
            raise Unreachable("the agent does not stop", hint=holder_hint(home, pid))
        time.sleep(0.02)
    connection.close()
    return True


def _ask_to_stop(home: StateDir, connection: Connection, pid: int | None, *, only_if_idle: bool) -> bool:
    path = f"/v1/agent/stop?only_if_idle={str(only_if_idle).lower()}" + (f"&pid={pid}" if pid else "")
    try:
        connection.ask("POST", path, timeout_s=STATUS_S)
    except (AgentGone, NotFound):
        return False
    except Unreachable as error:
        if only_if_idle or not kill_hung_agent(home, pid):
            raise Unreachable(error.message, cause=error.cause, hint=holder_hint(home, pid)) from error
    return True


def holder_hint(home: StateDir, pid: int | None = None) -> str:
    pid = pid or last_holder(home)
    return f"its pid is {pid}; if it hangs: kill -9 {pid}" if pid else f"see which process holds {home.lock}"
