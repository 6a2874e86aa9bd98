"""An agent on another machine, reached by ssh.

Paths are those of this machine: code, folders and job files are read here and sent.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import ugro
from ugro.client.client import Client
from ugro.client.http import AgentGone, Connection, account, connected
from ugro.client.jobs import new_key
from ugro.client.launcher import STATUS_S
from ugro.client.reach import ANSWER_S, Reach, Say
from ugro.features.recipes.client import LAUNCH as RECIPE_LAUNCH
from ugro.features.remote_access.client.link import MasterLink
from ugro.features.remote_access.client.master import Master, checked
from ugro.features.remote_access.client.relay import AGENT, Banner, expect_fitting, of_its_owner, team_agent
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotAllowed, UgroError, Wanted, error_from_wire
from ugro.kernel.support.state_dir import StateDir
from ugro.node import foreign

if TYPE_CHECKING:
    from ugro.features.remote_access.client.offer import Offer, Trees


_UPLOAD_S = 120.0
_MOST_ASKED = 500  # files and folders of one request
_TRIES = 3
_HEADER = "ugro-remote"
_NAMES_PATHS = frozenset({"here", "folder", "submit", "jobs"})
_WANTED = b'{"error":{"kind":"wanted"'


class Link(Protocol):
    """The way to the agent."""

    master: Master

    def open(self, to: str = ...) -> socket.socket: ...

    @property
    def banner(self) -> Banner: ...

    def close(self) -> None: ...


class RemoteAgent(Reach):
    is_elsewhere = True

    def __init__(
        self, to: Master | Link, home: StateDir, *, on_wait: Say | None = None, on_link: Say | None = None
    ) -> None:
        """``on_link``: told when the link breaks, and when it is back."""
        self._owns_link = isinstance(to, Master)
        self.link: Link = MasterLink(checked(to), home, on_link) if isinstance(to, Master) else to
        self.master = self.link.master
        self._trees: Trees | None = None
        self._made: set[str] = set()  # texts of launches that the agent has made
        super().__init__(home, on_wait)

    def connection(self) -> Connection:
        return Connection(self.home.socket, dial=self.link.open, headers=_headers(new_key()))

    def close(self) -> None:
        super().close()
        if self._owns_link:
            self.link.close()

    def twin(self) -> RemoteAgent:
        return RemoteAgent(self.link, self.home)

    # --- the agent ---------------------------------------------------------------------------------------------

    def agent(self) -> AgentStatus:
        for _ in range(_TRIES):
            try:
                return self._status()
            except AgentGone:
                continue  # it was stopped meanwhile, and the relay starts another one
        return self._status()

    def _status(self) -> AgentStatus:
        found = decode(AgentStatus, self._connection.ask("GET", "/v1/agent", timeout_s=STATUS_S))
        expect_fitting(found.version)  # another one than the relay has found may have been started since
        return found

    def running_agent(self) -> AgentStatus | None:
        """The relay has started it, if none ran."""
        return self.agent()

    def own(self, what: str) -> NoReturn:
        raise NotAllowed(f"{what} works on {self.master} alone", hint=f"log in there: ssh {self.master}")

    # --- requests ----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        key, body = new_key(), self._as_account(body)
        offer: Offer | None = None
        for _ in range(_MOST_ASKED):
            try:
                answer = self.reaching(
                    lambda: self._connection.ask(method, path, body, timeout_s=timeout_s, headers=_headers(key))
                )
            except Wanted as wanted:
                offer = offer or self._offer(key, body)
                offer.provide(wanted)
                continue
            if _asks_for_variables(answer):
                (offer or self._offer(key, body)).expect_variables(answer["needs"])
            if path == RECIPE_LAUNCH:
                self._note_made(body, answer)
            return self._located(answer)
        raise _endless()

    def stream(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = ANSWER_S
    ) -> Iterator[bytes]:
        if not isinstance(body, Mapping) or not _NAMES_PATHS & body.keys():
            yield from super().stream(method, path, body, timeout_s=timeout_s)
            return
        key, body = new_key(), self._as_account(body)
        offer = self._offer(key, body)
        for _ in range(_MOST_ASKED):
            try:
                for line in self._lines(method, path, body, key, timeout_s):
                    if _asks_for_variables(document := foreign.parsed(line, len(line))):
                        offer.expect_variables(document["needs"])
                    yield line
            except Wanted as wanted:
                offer.provide(wanted)
            else:
                return
        raise _endless()

    def _lines(self, method: str, path: str, body: Any, key: str, timeout_s: float | None) -> Iterator[bytes]:
        """A stream of documents. Raises Wanted, which comes instead of one of them."""
        connection, rest = self.connection(), b""
        try:
            for piece in self.reaching(
                lambda: connection.start(method, path, body, timeout_s=timeout_s, headers=_headers(key))
            ):
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    if line.startswith(_WANTED):
                        raise error_from_wire(foreign.parsed(line, len(line))["error"])
                    yield line + b"\n"
        finally:
            connection.close()

    def _offer(self, key: str, body: Any) -> Offer:
        from ugro.features.remote_access.client.offer import Offer  # most commands send nothing

        def send(item: dict[str, Any]) -> None:
            self.reaching(
                lambda: self._connection.ask(
                    "POST", "/v1/remote/items", {"items": [item]}, timeout_s=ANSWER_S, headers=_headers(key)
                )
            )

        return Offer(self.home, body, self._own_trees(), send, frozenset(self._made))

    def _note_made(self, body: Any, answer: Any) -> None:
        """What the agent has put into a launch is no word of the user: it names nothing of this machine."""
        from ugro.features.recipes.trainings import catalog
        from ugro.features.remote_access.client.offer import texts_of

        ours = {recipe.folder for recipe in catalog.all_recipes()}  # of our own package
        self._made |= texts_of(answer) - texts_of(body) - ours

    def _own_trees(self) -> Trees:
        if self._trees is None:
            from ugro.features.remote_access.client.offer import Trees, Wire

            self._trees = Trees(self.home, Wire(super().ask, self._upload, self.wait))
        return self._trees

    def _upload(self, path: str, pieces: Iterator[bytes]) -> Any:
        connection = self.connection()
        try:
            return connection.upload(path, pieces, timeout_s=_UPLOAD_S)
        finally:
            connection.close()

    def _located(self, answer: Any) -> Any:
        """With the master's name before the paths of results, which are there: MASTER:PATH."""
        results = answer.get("results") if isinstance(answer, dict) else None
        if isinstance(results, dict) and "folder" in results:
            results["folder"] = f"{self.master}:{results['folder']}"
            for part in results.get("parts") or ():
                part["path"] = f"{self.master}:{part['path']}"
        return answer

    def _as_account(self, body: Any) -> Any:
        """Who asks is the account there, whatever the user is called here."""
        if not isinstance(body, Mapping):
            return body
        found = {**body}
        if "user" in found:
            found["user"] = self.link.banner.user
        for name in ("submit", "jobs"):
            inner = found.get(name)
            if isinstance(inner, Mapping):
                found[name] = self._as_account(inner)
            elif isinstance(inner, list):
                found[name] = [self._as_account(one) for one in inner]
        return found


def _headers(key: str) -> dict[str, str]:
    machine = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname())[:64] or "unknown"
    return {_HEADER: f"{key} {machine}"}


def _asks_for_variables(answer: Any) -> bool:
    return isinstance(answer, dict) and "needs" in answer


def _endless() -> UgroError:
    return UgroError(f"the agent asks for more than {_MOST_ASKED} files", hint="put them into a folder of the job")


# --- client -----------------------------------------------------------------------------------------------------------
# ``ugro.RemoteClient``: the Python API for an agent on another machine, which is named.
#
# Everything that ``ugro.Client`` does works the same. Paths are those of this machine: code, folders and job files are
# read here and sent, results are written here.


class RemoteClient(Client):
    def __init__(
        self,
        master: str | Master,
        *,
        home: Path | str | None = None,
        on_wait: Say | None = None,
        on_link: Say | None = None,
    ) -> None:
        """``home``: this machine's state directory. ``on_link``: told when the link breaks, and when it is back."""
        own = StateDir(Path(home).absolute()) if home else StateDir.find(os.environ)
        to = Master(master) if isinstance(master, str) else master
        self.reach = RemoteAgent(to, own, on_wait=on_wait, on_link=on_link)


# --- team -------------------------------------------------------------------------------------------------------------
# A member of a team on the agent's own machine: somebody else's account runs the agent, and reads none of their files.
#
# So files are sent and results are fetched as from another machine, over the team's socket instead of ssh.


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
