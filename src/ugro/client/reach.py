"""How a client reaches its agent. Each kind is a file: this account's own, another machine's, a team's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ugro.client.http import Connection, NoAgent
from ugro.core.agent import AgentStatus
from ugro.core.support.state_dir import StateDir

if TYPE_CHECKING:
    from ugro.client.own_agent import OwnAgent
    from ugro.client.remote.master import Master

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
