"""``ugro.Client``: the typed Python API, and the only way the CLI talks to the agent.

It starts an agent if none runs, replaces one of another version, and raises the errors that the agent reports.
Types that only some calls need are imported there: importing this module takes most of a command's time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ugro.client.http import AgentGone, Connection, lines, trying_again
from ugro.client.parts import Parts
from ugro.client.reach import ANSWER_S, OwnAgent, OwnWish, Reach, chosen_reach
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
    from ugro.features.batches.pool import Pool
    from ugro.features.experiments.client import Experiments
    from ugro.features.hardware.client import HardwareCalls
    from ugro.features.remote_access.client.master import Master
    from ugro.kernel.links.model import Choice, NodeReport
    from ugro.kernel.operations.request import Lines, Raw, Request

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

    # --- nodes -------------------------------------------------------------------------------------------------

    def health(self, nodes: Sequence[str] = ()) -> list[NodeReport]:
        """Probes the nodes now, all at once; ordered by name."""
        from ugro.kernel.links.model import by_name
        from ugro.kernel.links.operations import CheckHealth

        return sorted(self.follow(CheckHealth(tuple(nodes))), key=lambda report: by_name(report.name))

    def best_node(self) -> Choice:
        """The node that a job would get, and why."""
        from ugro.kernel.links.operations import ChooseBestNode

        return self.ask(ChooseBestNode())


    # --- monitoring --------------------------------------------------------------------------------------------

    def metrics_page(self) -> bytes:
        """The page that Prometheus scrapes."""
        return b"".join(self._stream("GET", "/metrics"))

    # --- experiments -------------------------------------------------------------------------------------------

    @property
    def experiments(self) -> Experiments:
        from ugro.features.experiments.client import Experiments

        return Experiments(self)

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

        Closing the iterator, or the end of this process, stops the command on all nodes. ``EndCommand(key)`` does, too.
        """
        return execute(self._stream, nodes, argv, cwd=cwd, env=env, key=key)

    # --- the connection ----------------------------------------------------------------------------------------

    def ask(self, asked: Request[A], *, timeout_s: float = ANSWER_S) -> A:
        """Asks the agent, and returns its answer. Asks again if the agent ends meanwhile, where that is safe."""
        for _ in trying_again():
            try:
                return asked.read(self._ask(*asked.to_wire(), timeout_s=timeout_s))
            except AgentGone:
                if not asked.operation.can_repeat:
                    raise
        raise AssertionError("trying_again ends with an error")

    def follow(self, asked: Request[Lines[T]], *, timeout_s: float | None = ANSWER_S) -> Iterator[T]:
        """Yields the documents of an answer as they arrive."""
        for document in lines(self._stream(*asked.to_wire(), timeout_s=timeout_s)):
            found: T = decode(asked.operation.line, document)
            yield found

    def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        return self.reach.ask(method, path, body, timeout_s=timeout_s)

    def _stream(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = ANSWER_S) -> Any:
        return self.reach.stream(method, path, body, timeout_s=timeout_s)

    def streamed(self, asked: Request[Raw], *, timeout_s: float | None = ANSWER_S) -> Iterator[bytes]:
        """Yields the content of an answer as it arrives."""
        return self.reach.stream(*asked.to_wire(), timeout_s=timeout_s)
