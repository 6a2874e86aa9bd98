"""``ugro.Client``: the typed Python API, and the only way the CLI talks to the agent.

It starts an agent if none runs, replaces one of another version, and raises the errors that the agent reports.
Types that only some calls need are imported there: importing this module takes most of a command's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import ugro
from ugro.client.clusterfile import ClusterFile, find_cluster_file, when_allowed
from ugro.client.commands import Ended as Ended
from ugro.client.commands import OutputPiece as OutputPiece
from ugro.client.commands import execute
from ugro.client.http import AgentGone, Connection, NoAgent, lines
from ugro.client.launcher import START_LIMIT_S, is_locked, start_agent
from ugro.client.parts import Parts
from ugro.client.stopping import STATUS_S, end_agent, holder_hint, stop
from ugro.client.team import expect_own, team_agent
from ugro.core.agent import AgentStatus
from ugro.core.errors import NotAllowed, Unallowed, Unreachable
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import CLUSTER_VARIABLE, StateDir, chosen_socket

if TYPE_CHECKING:
    from ugro.batch.pool import Pool
    from ugro.client.remote.master import Master
    from ugro.client.tunnel import Tunnel
    from ugro.core.agent import DashboardLink
    from ugro.core.alert import Alert, Tried
    from ugro.core.audit import AuditEntry
    from ugro.core.code import Snapshot, SyncReport, SyncTotals, Tidied
    from ugro.core.event import Event
    from ugro.core.finding import Finding
    from ugro.core.hostkey import HostKey
    from ugro.core.node import NodeReport
    from ugro.policy.scheduling.selection import Choice

_ANSWER_S = 60.0
_LONGEST_SETTINGS = 32 * 1024  # in a header
_MOST_STOPPED = 3  # agents that are stopped by others before they answer
_Answer = TypeVar("_Answer")


class Client(Parts):
    master: Master | None = None  # None: the agent reads files of this machine itself
    is_elsewhere = False  # the agent is on another machine

    def __init__(
        self,
        *,
        home: Path | str | None = None,
        cluster: Path | str | None = None,
        any_cluster: bool = False,  # accepts an agent of any cluster
        log_level: str = "info",
        on_wait: Callable[[str], None] | None = None,
        on_unallowed: Callable[[Unallowed], bool] | None = None,  # asks the user; without it, the error is raised
    ) -> None:
        self.home = StateDir(Path(home).absolute()) if home else StateDir.find(os.environ)
        self._cluster = Path(cluster) if cluster is not None else None
        self._any_cluster = any_cluster
        self._log_level = log_level
        self._on_wait = on_wait
        self._on_unallowed = on_unallowed
        self._served: ClusterFile | None = None  # that of the agent which is restarted
        # Of a team's agent, which somebody else runs; None: the agent of this user, in its own state directory.
        self._team = chosen_socket(os.environ) if home is None else None
        self.socket = self._team or self.home.socket
        self._connection = self.connection()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The next call connects again."""
        self._connection.close()

    def connection(self) -> Connection:
        """A new one to the agent; opened when it is used."""
        return Connection(self.socket)

    # --- the agent ---------------------------------------------------------------------------------------------

    def agent(self) -> AgentStatus:
        """The running agent, started if necessary: of our version, and for the cluster that was asked for."""
        if self._team is not None:
            return team_agent(self._connection, self._team)
        return when_allowed(self._agent, self.home, self._on_unallowed)

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
        """The running agent of any version, or None; never starts one."""
        try:
            headers = _headers(os.environ) if self._team is None else {}
            answer = self._connection.ask("GET", "/v1/agent", timeout_s=STATUS_S, headers=headers)
        except AgentGone:
            return None
        return decode(AgentStatus, answer)

    def stop_agent(self, *, only_if_idle: bool = False, keeps_cluster: bool = False) -> bool:
        """Stops the agent and waits for its end; False if none ran. Jobs keep running.

        ``keeps_cluster``: the next agent continues with the same cluster file, even if it is not found again.
        """
        expect_own(self._team)
        has_stopped = end_agent(self.home, self._connection, only_if_idle=only_if_idle)
        for link in () if keeps_cluster else (self.home.served_cluster, self.home.served_found):
            with contextlib.suppress(OSError):
                link.unlink()
        return has_stopped

    def restart_agent(self) -> AgentStatus:
        """Stops the agent and starts another one, with the same cluster file unless another was asked for."""
        expect_own(self._team)
        before = self.running_agent()
        served = before.cluster_file if before is not None else None
        if self._cluster is None and not os.environ.get(CLUSTER_VARIABLE) and served and os.path.exists(served):
            is_found = before is not None and before.cluster_found
            self._served = ClusterFile(Path(served), is_asked_for=True, is_found=is_found)
            if is_found:
                self.require_allowed(Path(served))  # while the last agent still runs
        # If the next one does not start, the one after it still knows its cluster file.
        end_agent(self.home, self._connection)
        return self.agent()

    def require_allowed(self, path: Path) -> None:
        """For a cluster file that was found in a folder. Raises Unallowed."""
        from ugro.client.allowances import require

        when_allowed(lambda: require(self.home, path), self.home, self._on_unallowed)

    def use_cluster(self, path: Path | None) -> None:
        self._ask("PUT", "/v1/cluster", {"path": str(_absolute(path)) if path else None})

    def reload_cluster(self) -> AgentStatus:
        """Makes the agent read the cluster file now; it would do so within a second."""
        self._ask("POST", "/v1/cluster/reload")
        return decode(AgentStatus, self._ask("GET", "/v1/agent"))

    # --- nodes -------------------------------------------------------------------------------------------------

    def health(self, nodes: Sequence[str] = ()) -> list[NodeReport]:
        """Probes the nodes now, all at once; ordered by name."""
        from ugro.core.node import by_name

        return sorted(self.iter_health(nodes), key=lambda report: by_name(report.name))

    def iter_health(self, nodes: Sequence[str] = ()) -> Iterator[NodeReport]:
        """Each node's report as soon as it arrives."""
        from ugro.core.node import NodeReport

        for document in lines(self._stream("GET", "/v1/health" + _query("node", nodes))):
            yield decode(NodeReport, document)

    def best_node(self) -> Choice:
        from ugro.policy.scheduling.selection import Choice

        return decode(Choice, self._ask("GET", "/v1/best"))

    def add_node(self, name: str, **fields: Any) -> None:
        self._ask("POST", "/v1/nodes", {"name": name, "fields": fields})

    def remove_node(self, name: str, *, only_if_idle: bool = False) -> None:
        """``only_if_idle``: raises NotAllowed if a job runs there, or left files that are not here yet."""
        self._ask("DELETE", f"/v1/nodes/{_quoted(name)}{'?only_if_idle=true' if only_if_idle else ''}")

    def drain(self, name: str, reason: str = "") -> None:
        self._ask("POST", f"/v1/nodes/{_quoted(name)}/drain", {"reason": reason})

    def resume(self, name: str) -> None:
        self._ask("POST", f"/v1/nodes/{_quoted(name)}/resume")

    # --- code --------------------------------------------------------------------------------------------------

    def sync(
        self, folder: Path | str = ".", nodes: Sequence[str] = (), *, dry_run: bool = False, force: bool = False
    ) -> Iterator[Snapshot | SyncReport]:
        """Sends a folder's code to nodes (default: all). Yields the snapshot, then reports until all are done."""
        from ugro.core.code import Snapshot, SyncReport

        body = {"folder": os.path.abspath(folder), "nodes": list(nodes), "dry_run": dry_run, "force": force}
        for document in lines(self._stream("POST", "/v1/sync", body)):
            if "snapshot" in document:
                yield decode(Snapshot, document["snapshot"])
            elif "node" in document:
                yield decode(SyncReport, document["node"])

    def sync_totals(self) -> SyncTotals:
        from ugro.core.code import SyncTotals

        return decode(SyncTotals, self._ask("GET", "/v1/sync"))

    def tidy(self, nodes: Sequence[str] = (), *, everything: bool = False) -> list[Tidied]:
        """Removes unused code above the limit, on the nodes and here; or all unused code."""
        from ugro.core.code import Tidied

        answer = self._ask("POST", "/v1/tidy", {"nodes": list(nodes), "everything": everything})
        return [decode(Tidied, document) for document in answer["tidied"]]

    def host_key(self, name: str, ssh_config: str | None = None) -> HostKey:
        """Of a node, or of another host: NAME, USER@HOST or USER@HOST:PORT."""
        from ugro.core.hostkey import HostKey

        query = _query("ssh_config", [ssh_config] if ssh_config else [])
        return decode(HostKey, self._ask("GET", f"/v1/nodes/{_quoted(name)}/hostkey{query}"))

    def trust(self, key: HostKey, *, replace: bool = False, ssh_config: str | None = None) -> HostKey:
        """Accepts exactly this key."""
        body = {"fingerprints": list(key.fingerprints), "replace": replace, "ssh_config": ssh_config}
        return decode(type(key), self._ask("POST", f"/v1/nodes/{_quoted(key.node)}/hostkey", body))

    def doctor(self, nodes: Sequence[str] = ()) -> Iterator[Finding]:
        from ugro.core.finding import Finding

        for document in lines(self._stream("GET", "/v1/doctor" + _query("node", nodes))):
            yield decode(Finding, document)

    def ssh_hosts(self, ssh_config: str | None = None) -> list[str]:
        """The hosts in the user's ssh configuration."""
        found = self._ask("GET", "/v1/ssh-hosts" + _query("ssh_config", [ssh_config] if ssh_config else []))
        return [str(host) for host in found]

    def examine(self, hosts: Sequence[str], ssh_config: str | None = None) -> Iterator[NodeReport]:
        """Probes hosts, which need not be part of the cluster: NAME, USER@HOST or USER@HOST:PORT."""
        from ugro.core.node import NodeReport

        body = {"hosts": list(hosts), "ssh_config": ssh_config}
        for document in lines(self._stream("POST", "/v1/examine", body)):
            yield decode(NodeReport, document)

    # --- monitoring --------------------------------------------------------------------------------------------

    def alerts(self, limit: int = 100) -> tuple[list[Alert], list[Event]]:
        """Active alerts, and past events, the newest first."""
        from ugro.core.alert import Alert
        from ugro.core.event import Event

        answer = self._ask("GET", f"/v1/alerts?limit={limit}")
        return [decode(Alert, one) for one in answer["alerts"]], [decode(Event, one) for one in answer["events"]]

    def audit(self, *, since_unix_s: float = 0, user: str | None = None, limit: int = 1000) -> list[AuditEntry]:
        """Who did what: the newest entries, the oldest of them first."""
        from ugro.core.audit import AuditEntry

        query = f"?limit={limit}&since={since_unix_s}" + (f"&user={_quoted(user)}" if user is not None else "")
        return [decode(AuditEntry, one) for one in self._ask("GET", f"/v1/audit{query}")["audit"]]

    def test_channels(self, channels: Sequence[str] = ()) -> list[Tried]:
        """Sends a test message to channels (default: all)."""
        from ugro.core.alert import Tried

        answer = self._ask("POST", "/v1/alerts/test", {"channels": list(channels)})
        return [decode(Tried, one) for one in answer["channels"]]

    def dashboard(self) -> DashboardLink:
        """A link to the dashboard that works once, for some minutes."""
        from ugro.core.agent import DashboardLink

        return decode(DashboardLink, self._ask("POST", "/v1/dashboard"))

    def metrics_page(self) -> bytes:
        """The page that Prometheus scrapes."""
        return b"".join(self._stream("GET", "/metrics"))

    # --- many items --------------------------------------------------------------------------------------------

    def pool(
        self,
        *,
        nodes: int | Sequence[str] | None = None,
        engine: str | None = None,
        address: str | None = None,
        workers: int | None = None,
        **options: Any,
    ) -> Pool:
        """Processes for ``map``: of a Ray cluster, by its address or RAY_ADDRESS; of jobs on nodes; or of this machine.

        ``nodes``: how many, which, or all. ``options``: of the jobs, as those of ``ugro run``.
        """
        from ugro.client.batch import PoolWish, open_pool

        return open_pool(self, PoolWish(engine, nodes, workers, address, options))

    # --- connections to nodes ----------------------------------------------------------------------------------

    def tunnel(self, node: str, port: int, *, local_port: int = 0) -> Tunnel:
        """``with client.tunnel("gpu1", 8265) as local_port:`` forwards a port of this machine, as ``ssh -L`` does."""
        from ugro.client.tunnel import Dialer, Tunnel

        return Tunnel(Dialer(self, node, port), local_port=local_port)

    def twin(self) -> Client:
        """For another thread: a client is used by one at a time."""
        home, cluster = self.home.path, self._cluster
        return Client(home=home, cluster=cluster, any_cluster=self._any_cluster, log_level=self._log_level)

    # --- commands ----------------------------------------------------------------------------------------------

    def exec(
        self,
        nodes: Sequence[str],
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Generator[OutputPiece | Ended, None, None]:
        """Runs a command on nodes (names, ``@all``, ``@label``). Yields output as it arrives, then how each ended.

        Closing the iterator, or the end of this process, stops the command on all nodes. ``cancel`` takes the ``key``.
        """
        return execute(self._stream, nodes, argv, cwd=cwd, env=env, key=key)

    def cancel(self, key: str) -> None:
        """Stops a running ``exec``, whose iterator then reports how it ended on each node."""
        connection = self.connection()
        try:
            connection.ask("DELETE", f"/v1/exec/{_quoted(key)}", timeout_s=_ANSWER_S)
        finally:
            connection.close()

    # --- the connection ----------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = _ANSWER_S) -> Any:
        return self._reaching(lambda: self._connection.ask(method, path, body, timeout_s=timeout_s))

    def _stream(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = _ANSWER_S) -> Any:
        """A streamed answer has a connection of its own, so that other calls can be made meanwhile."""
        connection = self.connection()
        try:
            yield from self._reaching(lambda: connection.start(method, path, body, timeout_s=timeout_s))
        finally:
            connection.close()

    def streamed(self, method: str, path: str, body: Any = None) -> Iterator[bytes]:
        """The content of an answer, as it arrives."""
        stream: Iterator[bytes] = self._stream(method, path, body)
        return stream

    def _reaching(self, send: Callable[[], _Answer]) -> _Answer:
        """Starts the agent if necessary, and again if it is stopped before it got the request."""
        if not self._connection.is_usable:
            self.agent()
        for _ in range(_MOST_STOPPED):
            try:
                return send()
            except NoAgent:
                self.agent()
        return send()

    def _wanted(self) -> ClusterFile:
        if self._any_cluster:
            return ClusterFile(None)
        found = self._served or find_cluster_file(self._cluster, os.environ, Path.cwd(), self.home)
        return replace(found, path=_absolute(found.path)) if found.path else found

    def _start_agent(self, cluster: ClusterFile) -> bool:
        if is_locked(self.home):  # by an agent that is starting or stopping
            self._wait("waiting for the agent")
            time.sleep(0.02)
            return False
        return start_agent(self.home, cluster, log_level=self._log_level, on_wait=self._on_wait)

    def _replace(self, agent: AgentStatus) -> None:
        self._wait(f"replacing the agent of version {agent.version}")
        try:
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
            body = {"path": str(wanted.path), "found": wanted.is_found}
            self._connection.ask("PUT", "/v1/cluster", body, timeout_s=_ANSWER_S)
        except AgentGone:
            return  # switched or not: the caller looks again

    def _wait(self, what: str) -> None:
        if self._on_wait:
            self._on_wait(what)


def _is_served(wanted: ClusterFile, agent: AgentStatus) -> bool:
    if agent.cluster_file is None:
        return False
    if not wanted.is_asked_for or str(wanted.path) == agent.cluster_file:
        return True
    try:
        return os.path.samefile(str(wanted.path), agent.cluster_file)
    except OSError:
        return False


def _absolute(path: Path) -> Path:
    """Resolves the folder, but not the file: its link may be changed later."""
    return path.parent.resolve() / path.name


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    # The agent outlives the login that started it; only the newest ssh-agent works.
    socket = env.get("SSH_AUTH_SOCK", "")
    found = {"ugro-ssh-auth-sock": socket} if socket and socket.isascii() and socket.isprintable() else {}
    # The agent knows which of them are settings, and says which it does not use.
    settings = json.dumps({name: value for name, value in env.items() if name.startswith("UGRO_")})
    return {**found, "ugro-settings": settings} if len(settings) < _LONGEST_SETTINGS else found


def _query(key: str, values: Sequence[str]) -> str:
    return "?" + "&".join(f"{key}={_quoted(value)}" for value in values) if values else ""


def _quoted(text: str) -> str:
    """For a part of a URL."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~"
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in text.encode("utf-8", "surrogateescape"))
