"""How a client reaches its agent. Each kind is a file: this account's own, another machine's, a team's."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ugro
from ugro.client.http import AgentGone, Connection, NoAgent
from ugro.client.launcher import (
    START_LIMIT_S,
    STATUS_S,
    ClusterFile,
    end_agent,
    find_cluster_file,
    holder_hint,
    is_locked,
    start_agent,
    stop,
    when_allowed,
)
from ugro.features.remote_access.client.master import chosen_master
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.agent.operations import GetAgentStatus, UseClusterFile
from ugro.kernel.support.errors import NotAllowed, Unallowed, Unreachable
from ugro.kernel.support.state_dir import CLUSTER_VARIABLE, StateDir, chosen_socket

if TYPE_CHECKING:
    from ugro.features.remote_access.client.master import Master


ANSWER_S = 60.0
_MOST_STOPPED = 3  # agents that are stopped by others before they answer
_Answer = TypeVar("_Answer")
Say = Callable[[str], None]


class Reach:
    master: Master | None = None  # None: the agent reads files of this machine itself
    is_elsewhere = False  # the agent is on another machine

    def __init__(self, home: StateDir, on_wait: Say | None = None) -> None:
        """``home``: this account's state directory, on this machine."""
        self.home = home
        self.on_wait = on_wait
        self._connection = self.connection()

    def connection(self) -> Connection:
        """A new one to the agent; opened when it is used."""
        raise NotImplementedError

    def agent(self) -> AgentStatus:
        """The running agent, started if that is possible from here."""
        raise NotImplementedError

    def running_agent(self) -> AgentStatus | None:
        """The running agent of any version, or None."""
        raise NotImplementedError

    def own(self, what: str) -> OwnAgent:
        """For what only the account that runs the agent can do, on its machine. Raises NotAllowed."""
        raise NotImplementedError

    def twin(self) -> Reach:
        """For another thread: one is used by one at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """The next call connects again."""
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        return self.reaching(lambda: self._connection.ask(method, path, body, timeout_s=timeout_s))

    def stream(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = ANSWER_S
    ) -> Iterator[bytes]:
        """A streamed answer has a connection of its own, so that other calls can be made meanwhile."""
        connection = self.connection()
        try:
            yield from self.reaching(lambda: connection.start(method, path, body, timeout_s=timeout_s))
        finally:
            connection.close()

    def reaching(self, send: Callable[[], _Answer]) -> _Answer:
        """Starts the agent if necessary, and again if it is stopped before it got the request."""
        if not self._connection.is_usable:
            self.agent()
        for _ in range(_MOST_STOPPED):
            try:
                return send()
            except NoAgent:
                self.agent()
        return send()

    def wait(self, what: str) -> None:
        if self.on_wait:
            self.on_wait(what)


# --- own agent --------------------------------------------------------------------------------------------------------
# The agent of this account, on this machine: started if none runs, replaced if it has another version.


_LONGEST_SETTINGS = 32 * 1024  # in a header


@dataclass(frozen=True, slots=True)
class OwnWish:
    cluster: Path | None = None
    any_cluster: bool = False  # accepts an agent of any cluster
    log_level: str = "info"
    on_wait: Say | None = None
    on_unallowed: Callable[[Unallowed], bool] | None = None  # asks the user; without it, the error is raised


class OwnAgent(Reach):
    def __init__(self, home: StateDir, wish: OwnWish) -> None:
        self._wish = wish
        self._served: ClusterFile | None = None  # that of the agent which is restarted
        super().__init__(home, wish.on_wait)

    def connection(self) -> Connection:
        return Connection(self.home.socket)

    def own(self, what: str) -> OwnAgent:
        return self

    def twin(self) -> OwnAgent:
        return OwnAgent(self.home, replace(self._wish, on_wait=None, on_unallowed=None))

    def agent(self) -> AgentStatus:
        """Of our version, and for the cluster that was asked for."""
        return when_allowed(self._agent, self.home, self._wish.on_unallowed)

    def _agent(self) -> AgentStatus:
        deadline = time.monotonic() + START_LIMIT_S
        wanted = self._wanted()
        has_started_it = False
        while time.monotonic() < deadline:
            agent = self.running_agent()
            if agent is None:
                has_started_it = self._start_agent(wanted)
            elif agent.version != ugro.__version__ and has_started_it:
                raise NotAllowed(
                    f"ugro was changed from {ugro.__version__} to {agent.version} while this program ran",
                    hint="start this program again",
                )
            elif agent.version != ugro.__version__:
                self._replace(agent)
            elif wanted.path is None or _is_served(wanted, agent):
                return agent
            else:
                self._switch(wanted, agent)
        raise Unreachable(
            f"no agent answers within {START_LIMIT_S:g} s", hint=f"{holder_hint(self.home)}; see: ugro agent logs"
        )

    def running_agent(self) -> AgentStatus | None:
        """Never starts one."""
        try:
            asked = GetAgentStatus()
            return asked.read(self._connection.ask(*asked.to_wire(), timeout_s=STATUS_S, headers=_headers(os.environ)))
        except AgentGone:
            return None

    def stop(self, *, only_if_idle: bool, keeps_cluster: bool) -> bool:
        has_stopped = end_agent(self.home, self._connection, only_if_idle=only_if_idle)
        for link in () if keeps_cluster else (self.home.served_cluster, self.home.served_found):
            with contextlib.suppress(OSError):
                link.unlink()
        return has_stopped

    def restart(self) -> AgentStatus:
        self._expect_startable()
        before = self.running_agent()
        served = before.cluster_file if before is not None else None
        if self._wish.cluster is None and not os.environ.get(CLUSTER_VARIABLE) and served and os.path.exists(served):
            is_found = before is not None and before.cluster_found
            self._served = ClusterFile(Path(served), is_asked_for=True, is_found=is_found)
            if is_found:
                self.require_allowed(Path(served))  # while the last agent still runs
        # If the next one does not start, the one after it still knows its cluster file.
        end_agent(self.home, self._connection)
        return self.agent()

    def require_allowed(self, path: Path) -> None:
        from ugro.client.before_agent import require

        when_allowed(lambda: require(self.home, path), self.home, self._wish.on_unallowed)

    def _wanted(self) -> ClusterFile:
        if self._wish.any_cluster:
            return ClusterFile(None)
        found = self._served or find_cluster_file(self._wish.cluster, os.environ, Path.cwd(), self.home)
        return replace(found, path=absolute(found.path)) if found.path else found

    def _start_agent(self, cluster: ClusterFile) -> bool:
        if is_locked(self.home):  # by an agent that is starting or stopping
            self.wait("waiting for the agent")
            time.sleep(0.02)
            return False
        return start_agent(self.home, cluster, log_level=self._wish.log_level, on_wait=self.on_wait)

    def _expect_startable(self) -> None:
        from ugro.client.service import installed  # most commands find a running agent

        if (service := installed(self.home)) is not None:
            service.expect_startable(os.geteuid())

    def _replace(self, agent: AgentStatus) -> None:
        self.wait(f"replacing the agent of version {agent.version}")
        try:
            self._expect_startable()
            stop(self.home, self._connection, agent.pid, only_if_idle=True)
        except NotAllowed as error:
            raise NotAllowed(
                f"the agent has version {agent.version}, this is {ugro.__version__}: {error.message}", hint=error.hint
            ) from error

    def _switch(self, wanted: ClusterFile, agent: AgentStatus) -> None:
        if agent.cluster_file is not None:
            raise NotAllowed(
                f"the agent in {self.home.path} uses {agent.cluster_file}, not {wanted.path}",
                hint=f"stop it first: ugro agent stop; or use its cluster here: ugro --cluster {agent.cluster_file} …; "
                "or use both at once: UGRO_HOME=DIR ugro …",
            )
        try:
            asked = UseClusterFile(str(wanted.path), wanted.is_found)
            self._connection.ask(*asked.to_wire(), timeout_s=ANSWER_S)
        except AgentGone:
            return  # switched or not: the caller looks again


def _is_served(wanted: ClusterFile, agent: AgentStatus) -> bool:
    if agent.cluster_file is None:
        return False
    if not wanted.is_asked_for or str(wanted.path) == agent.cluster_file:
        return True
    try:
        return os.path.samefile(str(wanted.path), agent.cluster_file)
    except OSError:
        return False


def absolute(path: Path) -> Path:
    """Resolves the folder, but not the file: its link may be changed later."""
    return path.parent.resolve() / path.name


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    # The agent outlives the login that started it; only the newest ssh-agent works.
    socket = env.get("SSH_AUTH_SOCK", "")
    found = {"ugro-ssh-auth-sock": socket} if socket and socket.isascii() and socket.isprintable() else {}
    # The agent knows which of them are settings, and says which it does not use.
    settings = json.dumps({name: value for name, value in env.items() if name.startswith("UGRO_")})
    return {**found, "ugro-settings": settings} if len(settings) < _LONGEST_SETTINGS else found


# --- choice -----------------------------------------------------------------------------------------------------------
# Which agent a client uses: that of a master, of a team, or of this account.


def chosen_reach(
    wish: OwnWish, *, named: str | None = None, command: str | None = None, on_link: Say | None = None
) -> Reach:
    """``named``: a master, before all others; ``command``: the path of ugro there.

    ``on_link``: told when the link to it breaks, and when it is back.
    """
    home = StateDir.find(os.environ)
    master = chosen_master(os.environ, home, named=named, command=command)
    if master is not None:
        from ugro.features.remote_access.client.agent import RemoteAgent

        if wish.cluster is not None:
            hint = f"for this machine: --master local, or unset UGRO_MASTER; for that one: ssh {master}"
            raise NotAllowed(f"{wish.cluster} is a file of this machine, and the agent of {master} is used", hint=hint)
        return RemoteAgent(master, home, on_wait=wish.on_wait, on_link=on_link)
    if (path := chosen_socket(os.environ)) is not None:
        from ugro.features.remote_access.client.agent import TeamAgent

        return TeamAgent(path, home, on_wait=wish.on_wait)
    return OwnAgent(home, wish)
