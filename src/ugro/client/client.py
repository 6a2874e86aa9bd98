"""``ugro.Client``: the typed Python API, and the only way the CLI talks to the agent.

It starts an agent if none runs, replaces one of another version, and raises the errors that the agent reports.
Types that only some calls need are imported there: importing this module takes most of a command's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ugro.client.http import Connection, lines
from ugro.client.parts import Parts
from ugro.client.reach import ANSWER_S, OwnAgent, OwnWish, Reach, absolute, chosen_reach
from ugro.features.exec.client import Ended as Ended
from ugro.features.exec.client import OutputPiece as OutputPiece
from ugro.features.exec.client import execute
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import Unallowed
from ugro.kernel.support.state_dir import StateDir

if TYPE_CHECKING:
    from ugro.client.pulling import Pulled
    from ugro.client.tunnel import Tunnel
    from ugro.features.alerts.model import Alert, Tried
    from ugro.features.batches.pool import Pool
    from ugro.features.hardware.client import HardwareCalls
    from ugro.features.remote_access.client.master import Master
    from ugro.kernel.access.model import AuditEntry
    from ugro.kernel.agent.model import DashboardLink, Event, Finding
    from ugro.kernel.files.model import Snapshot, SyncReport, SyncTotals, Tidied
    from ugro.kernel.links.model import HostKey, NodeReport
    from ugro.kernel.links.rules import Choice
    from ugro.kernel.operations.request import Lines, Request

A = TypeVar("A")
T = TypeVar("T")


class Client(Parts):
    """Uses the agent that commands use: of the master that ``ugro login`` or UGRO_MASTER names, of the team that
    UGRO_SOCKET names, or this account's own. With ``home``, this account's own in that folder, whatever is set.
    """

    reach: Reach

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
        file = Path(cluster) if cluster is not None else None
        wish = OwnWish(file, any_cluster, log_level, on_wait, on_unallowed)
        self.reach = OwnAgent(StateDir(Path(home).absolute()), wish) if home else chosen_reach(wish)

    @classmethod
    def through(cls, reach: Reach) -> Client:
        made = Client.__new__(Client)
        made.reach = reach
        return made

    @property
    def home(self) -> StateDir:
        """This account's state directory, on this machine."""
        return self.reach.home

    @property
    def master(self) -> Master | None:
        """Where the agent is that does not read files of this account; None: it does."""
        return self.reach.master

    @property
    def is_elsewhere(self) -> bool:
        """The agent is on another machine."""
        return self.reach.is_elsewhere

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The next call connects again."""
        self.reach.close()

    def connection(self) -> Connection:
        """A new one to the agent; opened when it is used."""
        return self.reach.connection()

    # --- the agent ---------------------------------------------------------------------------------------------

    def agent(self) -> AgentStatus:
        """The running agent, started if necessary: of our version, and for the cluster that was asked for."""
        return self.reach.agent()

    def running_agent(self) -> AgentStatus | None:
        """The running agent of any version, or None; never starts one on this machine."""
        return self.reach.running_agent()

    def stop_agent(self, *, only_if_idle: bool = False, keeps_cluster: bool = False) -> bool:
        """Stops the agent and waits for its end; False if none ran. Jobs keep running.

        ``keeps_cluster``: the next agent continues with the same cluster file, even if it is not found again.
        """
        own = self.reach.own("stopping the agent")
        return own.stop(only_if_idle=only_if_idle, keeps_cluster=keeps_cluster)

    def restart_agent(self) -> AgentStatus:
        """Stops the agent and starts another one, with the same cluster file unless another was asked for."""
        return self.reach.own("restarting the agent").restart()

    def require_allowed(self, path: Path) -> None:
        """For a cluster file that was found in a folder. Raises Unallowed."""
        self.reach.own("allowing a cluster file").require_allowed(path)

    def use_cluster(self, path: Path | None) -> None:
        self.reach.own("choosing a cluster file")
        self._ask("PUT", "/v1/cluster", {"path": str(absolute(path)) if path else None})

    def reload_cluster(self) -> AgentStatus:
        """Makes the agent read the cluster file now; it would do so within a second."""
        self._ask("POST", "/v1/cluster/reload")
        return decode(AgentStatus, self._ask("GET", "/v1/agent"))

    # --- nodes -------------------------------------------------------------------------------------------------

    def health(self, nodes: Sequence[str] = ()) -> list[NodeReport]:
        """Probes the nodes now, all at once; ordered by name."""
        from ugro.kernel.links.model import by_name

        return sorted(self.iter_health(nodes), key=lambda report: by_name(report.name))

    def iter_health(self, nodes: Sequence[str] = ()) -> Iterator[NodeReport]:
        """Each node's report as soon as it arrives."""
        from ugro.kernel.links.model import NodeReport

        for document in lines(self._stream("GET", "/v1/health" + _query("node", nodes))):
            yield decode(NodeReport, document)

    def best_node(self) -> Choice:
        from ugro.kernel.links.rules import Choice

        return decode(Choice, self._ask("GET", "/v1/best"))

    def add_node(self, name: str, **fields: Any) -> None:
        self._ask("POST", "/v1/nodes", {"name": name, "fields": fields})

    def remove_node(self, name: str, *, only_if_idle: bool = False, even_with_jobs: bool = False) -> None:
        """Raises NotAllowed if a job runs there, unless ``even_with_jobs``.

        ``only_if_idle``: raises NotAllowed also if a job left files that are not here yet.
        """
        wanted = ["only_if_idle=true"] * only_if_idle + ["even_with_jobs=true"] * even_with_jobs
        self._ask("DELETE", f"/v1/nodes/{_quoted(name)}{'?' if wanted else ''}{'&'.join(wanted)}")

    def drain(self, name: str, reason: str = "") -> None:
        self._ask("POST", f"/v1/nodes/{_quoted(name)}/drain", {"reason": reason})

    def resume(self, name: str) -> None:
        self._ask("POST", f"/v1/nodes/{_quoted(name)}/resume")

    # --- code --------------------------------------------------------------------------------------------------

    def sync(
        self, folder: Path | str = ".", nodes: Sequence[str] = (), *, dry_run: bool = False, force: bool = False
    ) -> Iterator[Snapshot | SyncReport]:
        """Sends a folder's code to nodes (default: all). Yields the snapshot, then reports until all are done."""
        from ugro.kernel.files.model import Snapshot, SyncReport

        body = {"folder": os.path.abspath(folder), "nodes": list(nodes), "dry_run": dry_run, "force": force}
        for document in lines(self._stream("POST", "/v1/sync", body)):
            if "snapshot" in document:
                yield decode(Snapshot, document["snapshot"])
            elif "node" in document:
                yield decode(SyncReport, document["node"])

    def sync_totals(self) -> SyncTotals:
        from ugro.kernel.files.model import SyncTotals

        return decode(SyncTotals, self._ask("GET", "/v1/sync"))

    def tidy(self, nodes: Sequence[str] = (), *, everything: bool = False) -> list[Tidied]:
        """Removes unused code above the limit, on the nodes and here; or all unused code."""
        from ugro.kernel.files.model import Tidied

        answer = self._ask("POST", "/v1/tidy", {"nodes": list(nodes), "everything": everything})
        return [decode(Tidied, document) for document in answer["tidied"]]

    def host_key(self, name: str, ssh_config: str | None = None) -> HostKey:
        """Of a node, or of another host: NAME, USER@HOST or USER@HOST:PORT."""
        from ugro.kernel.links.model import HostKey

        query = _query("ssh_config", [ssh_config] if ssh_config else [])
        return decode(HostKey, self._ask("GET", f"/v1/nodes/{_quoted(name)}/hostkey{query}"))

    def trust(self, key: HostKey, *, replace: bool = False, ssh_config: str | None = None) -> HostKey:
        """Accepts exactly this key."""
        body = {"fingerprints": list(key.fingerprints), "replace": replace, "ssh_config": ssh_config}
        return decode(type(key), self._ask("POST", f"/v1/nodes/{_quoted(key.node)}/hostkey", body))

    def doctor(self, nodes: Sequence[str] = ()) -> Iterator[Finding]:
        from ugro.kernel.agent.model import Finding

        for document in lines(self._stream("GET", "/v1/doctor" + _query("node", nodes))):
            yield decode(Finding, document)

    def ssh_hosts(self, ssh_config: str | None = None) -> list[str]:
        """The hosts in the user's ssh configuration."""
        found = self._ask("GET", "/v1/ssh-hosts" + _query("ssh_config", [ssh_config] if ssh_config else []))
        return [str(host) for host in found]

    def examine(self, hosts: Sequence[str], ssh_config: str | None = None) -> Iterator[NodeReport]:
        """Probes hosts, which need not be part of the cluster: NAME, USER@HOST or USER@HOST:PORT."""
        from ugro.kernel.links.model import NodeReport

        body = {"hosts": list(hosts), "ssh_config": ssh_config}
        for document in lines(self._stream("POST", "/v1/examine", body)):
            yield decode(NodeReport, document)

    # --- monitoring --------------------------------------------------------------------------------------------

    def alerts(self, limit: int = 100) -> tuple[list[Alert], list[Event]]:
        """Active alerts, and past events, the newest first."""
        from ugro.features.alerts.model import Alert
        from ugro.kernel.agent.model import Event

        answer = self._ask("GET", f"/v1/alerts?limit={limit}")
        return [decode(Alert, one) for one in answer["alerts"]], [decode(Event, one) for one in answer["events"]]

    def audit(self, *, since_unix_s: float = 0, user: str | None = None, limit: int = 1000) -> list[AuditEntry]:
        """Who did what: the newest entries, the oldest of them first."""
        from ugro.kernel.access.model import AuditEntry

        query = f"?limit={limit}&since={since_unix_s}" + (f"&user={_quoted(user)}" if user is not None else "")
        return [decode(AuditEntry, one) for one in self._ask("GET", f"/v1/audit{query}")["audit"]]

    def test_channels(self, channels: Sequence[str] = ()) -> list[Tried]:
        """Sends a test message to channels (default: all)."""
        from ugro.features.alerts.model import Tried

        answer = self._ask("POST", "/v1/alerts/test", {"channels": list(channels)})
        return [decode(Tried, one) for one in answer["channels"]]

    def dashboard(self) -> DashboardLink:
        """A link to the dashboard that works once, for some minutes."""
        from ugro.kernel.agent.model import DashboardLink

        return decode(DashboardLink, self._ask("POST", "/v1/dashboard"))

    def metrics_page(self) -> bytes:
        """The page that Prometheus scrapes."""
        return b"".join(self._stream("GET", "/metrics"))

    # --- results -----------------------------------------------------------------------------------------------

    def pull(
        self, job: str | int, target: Path | str, *, attempt: int | None = None, force: bool = False
    ) -> Pulled:
        """Copies a job's results to a folder here, once they are collected; ``force`` overwrites files that differ."""
        from ugro.client.pulling import arrived, pull

        _, made = arrived(self, job, attempt, lambda made: self.reach.wait(f"the results of job {made.job}"))
        return pull(self, made, Path(target), is_forced=force, on_progress=lambda done: None)

    @property
    def hardware(self) -> HardwareCalls:
        from ugro.features.hardware.client import HardwareCalls

        return HardwareCalls(self)

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
        from ugro.features.batches.client import PoolWish, open_pool

        return open_pool(self, PoolWish(engine, nodes, workers, address, options))

    # --- connections to nodes ----------------------------------------------------------------------------------

    def tunnel(self, node: str, port: int, *, local_port: int = 0) -> Tunnel:
        """``with client.tunnel("gpu1", 8265) as local_port:`` forwards a port of this machine, as ``ssh -L`` does."""
        from ugro.client.tunnel import Dialer, Tunnel

        return Tunnel(Dialer(self, node, port), local_port=local_port)

    def twin(self) -> Client:
        """For another thread: a client is used by one at a time."""
        return Client.through(self.reach.twin())

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
            connection.ask("DELETE", f"/v1/exec/{_quoted(key)}", timeout_s=ANSWER_S)
        finally:
            connection.close()

    # --- the connection ----------------------------------------------------------------------------------------

    def ask(self, asked: Request[A], *, timeout_s: float = ANSWER_S) -> A:
        """Asks the agent, and returns its answer."""
        content = self._ask(*asked.to_wire(), timeout_s=timeout_s)
        found: A = asked.read(content)
        return found

    def follow(self, asked: Request[Lines[T]], *, timeout_s: float | None = ANSWER_S) -> Iterator[T]:
        """Yields the documents of an answer as they arrive."""
        for document in lines(self._stream(*asked.to_wire(), timeout_s=timeout_s)):
            found: T = decode(asked.operation.line, document)
            yield found

    def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        return self.reach.ask(method, path, body, timeout_s=timeout_s)

    def _stream(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = ANSWER_S) -> Any:
        return self.reach.stream(method, path, body, timeout_s=timeout_s)

    def streamed(self, method: str, path: str, body: Any = None) -> Iterator[bytes]:
        """The content of an answer, as it arrives."""
        return self.reach.stream(method, path, body)


def _query(key: str, values: Sequence[str]) -> str:
    return "?" + "&".join(f"{key}={_quoted(value)}" for value in values) if values else ""


def _quoted(text: str) -> str:
    """For a part of a URL."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~"
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in text.encode("utf-8", "surrogateescape"))
