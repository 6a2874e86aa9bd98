"""``ugro.Client``: the typed Python API, and the only way the CLI talks to the agent.

It starts an agent when there is none, replaces one of another version, and raises the same errors the agent did.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

import ugro
from ugro.clusterfile import find_cluster_file
from ugro.core.agent import AgentStatus
from ugro.core.codec import decode
from ugro.core.errors import NotAllowed, UgroError, Unreachable, error_from_wire
from ugro.core.finding import Finding
from ugro.core.hostkey import HostKey
from ugro.core.node import NodeReport
from ugro.core.statedir import StateDir
from ugro.http import AgentGone, Connection, chunks, lines
from ugro.launcher import start_agent
from ugro.policy.selection import Choice
from ugro.remote import wire

_ANSWER_S = 60.0
_END_S = 15.0


@dataclass(frozen=True, slots=True)
class Output:
    """Some bytes a command wrote on a node."""

    node: str
    is_stderr: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended on a node: a code, a signal, or an error that kept it from running."""

    node: str
    code: int | None = None
    signal: int | None = None
    error: UgroError | None = None

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        return 128 + self.signal if self.signal else (self.code or 0)


class Client:
    def __init__(
        self,
        *,
        home: Path | None = None,
        cluster: Path | None = None,
        log_level: str = "info",
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.home = StateDir(home) if home else StateDir.find(os.environ)
        self._wanted = find_cluster_file(cluster, os.environ, Path.cwd(), self.home)
        self._log_level = log_level
        self._on_wait = on_wait
        self._connection: Connection | None = None
        self._agent: AgentStatus | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- the agent ---------------------------------------------------------------------------------------------

    def agent(self) -> AgentStatus:
        """The running agent, started if need be."""
        self._connected()
        assert self._agent is not None
        return self._agent

    def running_agent(self) -> AgentStatus | None:
        """The running agent of whatever version, or None; never starts one."""
        connection = Connection(self.home.socket, _ANSWER_S)
        try:
            return decode(AgentStatus, connection.ask("GET", "/v1/agent", headers=_headers()))
        except AgentGone:
            return None
        finally:
            connection.close()

    def stop_agent(self, *, only_if_idle: bool = False) -> bool:
        """Ends the agent and waits until it is gone; False when there was none. Jobs are not touched."""
        self.close()
        connection = Connection(self.home.socket, _ANSWER_S)
        try:
            connection.ask("POST", f"/v1/agent/stop?only_if_idle={str(only_if_idle).lower()}")
        except AgentGone:
            return False
        finally:
            connection.close()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            if not self.home.socket.exists() and not _is_locked(self.home):
                return True
            time.sleep(0.02)
        raise Unreachable("the agent does not end", hint=f"its pid is in {self.home.lock}")

    def use_cluster(self, path: Path | None) -> None:
        self._ask("PUT", "/v1/cluster", {"path": str(path.absolute()) if path else None})

    def reload_cluster(self) -> AgentStatus:
        """Takes up an edit of the cluster file now, not within the second."""
        self._ask("POST", "/v1/cluster/reload")
        self._agent = decode(AgentStatus, self._ask("GET", "/v1/agent"))
        return self._agent

    # --- nodes -------------------------------------------------------------------------------------------------

    def health(self, nodes: Sequence[str] = ()) -> list[NodeReport]:
        """Probes the nodes now, all at once; in the cluster's order."""
        return sorted(self.iter_health(nodes), key=lambda report: report.name)

    def iter_health(self, nodes: Sequence[str] = ()) -> Iterator[NodeReport]:
        """Each node's report as soon as it is there."""
        for document in lines(self._start("GET", f"/v1/health{_query(nodes)}")):
            yield decode(NodeReport, document)

    def best_node(self) -> Choice:
        return decode(Choice, self._ask("GET", "/v1/best"))

    def add_node(self, name: str, **fields: Any) -> None:
        self._ask("POST", "/v1/nodes", {"name": name, "fields": fields})

    def remove_node(self, name: str) -> None:
        self._ask("DELETE", f"/v1/nodes/{quote(name, safe='')}")

    def drain(self, name: str, reason: str = "") -> None:
        self._ask("POST", f"/v1/nodes/{quote(name, safe='')}/drain", {"reason": reason})

    def resume(self, name: str) -> None:
        self._ask("POST", f"/v1/nodes/{quote(name, safe='')}/resume")

    def host_key(self, name: str) -> HostKey:
        return decode(HostKey, self._ask("GET", f"/v1/nodes/{quote(name, safe='')}/hostkey"))

    def trust(self, key: HostKey, *, replace: bool = False) -> HostKey:
        """Accepts exactly the key that was looked at."""
        body = {"fingerprints": list(key.fingerprints), "replace": replace}
        return decode(HostKey, self._ask("POST", f"/v1/nodes/{quote(key.node, safe='')}/hostkey", body))

    def doctor(self, nodes: Sequence[str] = ()) -> Iterator[Finding]:
        for document in lines(self._start("GET", f"/v1/doctor{_query(nodes)}")):
            yield decode(Finding, document)

    def ssh_hosts(self, ssh_config: str | None = None) -> list[str]:
        """The machines that the user's ssh configuration names."""
        found = self._ask("GET", "/v1/ssh-hosts" + (f"?{urlencode({'ssh_config': ssh_config})}" if ssh_config else ""))
        return [str(host) for host in found]

    def examine(self, hosts: Sequence[str], ssh_config: str | None = None) -> Iterator[NodeReport]:
        """Tries hosts that need not be part of the cluster: NAME, USER@HOST or USER@HOST:PORT."""
        body = {"hosts": list(hosts), "ssh_config": ssh_config}
        for document in lines(self._start("POST", "/v1/examine", body)):
            yield decode(NodeReport, document)

    # --- commands ----------------------------------------------------------------------------------------------

    def exec(
        self,
        nodes: Sequence[str],
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Iterator[Output | Ended]:
        """Runs a command on nodes at once (names, ``@all``, ``@label``): output as it comes, then how each ended.

        Closing the iterator, or this process ending, ends the command everywhere. ``key`` lets ``cancel`` name it.
        """
        body = {
            "key": key or secrets.token_hex(8),
            "nodes": list(nodes),
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
        }
        response = self._start("POST", "/v1/exec", body)
        decoder = wire.Decoder()
        names: list[str] = []
        try:
            for chunk in chunks(response):
                for kind, index, payload in decoder.feed(chunk):
                    if kind == wire.CALL:
                        names = list(wire.parse(payload)["nodes"])
                    else:
                        yield _event(names[index], kind, payload)
        finally:
            self.close()

    def cancel(self, key: str) -> None:
        """Ends a running ``exec``; its iterator then reports how each node ended it."""
        with contextlib.closing(Connection(self.home.socket, _ANSWER_S)) as connection:
            connection.ask("DELETE", f"/v1/exec/{quote(key, safe='')}")

    # --- the connection ----------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return self._connected().ask(method, path, body)

    def _start(self, method: str, path: str, body: Any = None) -> Any:
        return self._connected().start(method, path, body)

    def _connected(self) -> Connection:
        if self._connection is None:
            self._agent = self._find_agent()
            connection = Connection(self.home.socket)
            connection.connect()
            self._connection = connection
        return self._connection

    def _find_agent(self) -> AgentStatus:
        """An agent of our version that serves the cluster we were asked for."""
        agent = self.running_agent()
        if agent is not None and agent.version != ugro.__version__:
            self._wait(f"replacing the agent of version {agent.version}")
            self.stop_agent(only_if_idle=True)
            agent = None
        if agent is None:
            start_agent(self.home, self._wanted.path, log_level=self._log_level, on_wait=self._on_wait)
            agent = self.running_agent()
        if agent is None:
            raise Unreachable("the agent ended right after its start", hint="see: ugro agent logs")
        return self._agree_on_cluster(agent)

    def _agree_on_cluster(self, agent: AgentStatus) -> AgentStatus:
        wanted = self._wanted
        serves = Path(agent.cluster_file) if agent.cluster_file else None
        if wanted.path is None or wanted.path == serves or (serves is not None and not wanted.is_asked_for):
            return agent
        if serves is None:
            with contextlib.closing(Connection(self.home.socket, _ANSWER_S)) as connection:
                connection.ask("PUT", "/v1/cluster", {"path": str(wanted.path)})
            return self.running_agent() or agent
        raise NotAllowed(
            f"the agent of {self.home.path} serves {serves}, not {wanted.path}",
            hint="stop it first: ugro agent stop; or use both at once: UGRO_HOME=DIR ugro …",
        )

    def _wait(self, what: str) -> None:
        if self._on_wait:
            self._on_wait(what)


def _headers() -> dict[str, str]:
    # The agent outlives the login it was started in; the newest ssh-agent is the one that works.
    socket = os.environ.get("SSH_AUTH_SOCK")
    return {"ugro-ssh-auth-sock": socket} if socket else {}


def _query(nodes: Sequence[str]) -> str:
    return "?" + urlencode([("node", name) for name in nodes]) if nodes else ""


def _event(node: str, kind: int, payload: bytes) -> Output | Ended:
    if kind in (wire.OUT, wire.ERR):
        return Output(node, kind == wire.ERR, payload)
    value = wire.parse(payload)
    if kind == wire.ERROR:
        return Ended(node, error=error_from_wire(value))
    return Ended(node, code=value.get("code"), signal=value.get("signal"))


def _is_locked(home: StateDir) -> bool:
    import fcntl

    try:
        descriptor = os.open(home.lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
