"""A node of one's own on this machine: real node programs over the local transport, each behind a real ``Link``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.rig.waiting import (
    descendants,
    end_all_with_variable,
    is_alive,
    processes_with_variable,
    signal_all,
    wait_until,
)
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import RemoteFailure
from ugro.node import durable
from ugro.node.machine import node_key
from ugro.node.process.terminate import ProcessName
from ugro.node.runs.rundir import AgentDir

T = TypeVar("T")
AGENT = "agent-1"
MARK = "TEST_NODE_ROOT"  # of everything that a node program starts
_OPEN_S = 20


def agent_folder(root: Path, node: str) -> Path:
    """What the tests' agent has on a node."""
    return root / ".ugro" / "agents" / f"{AGENT}@{node_key(node)}"


class LocalNode:
    """Loops only while something is asked; so a test reads like a script."""

    def __init__(self, root: Path, *, prefix: tuple[str, ...] = (), python: str = sys.executable) -> None:
        self.root = root
        self.generation = 1
        self.spec = NodeSpec(
            "here", remote_root=str(root), python=python or None, transport=prefix or "local", env=((MARK, str(root)),)
        )
        self._runner = asyncio.Runner()
        self._links: list[Link] = []

    # --- links --------------------------------------------------------------------------------------------------

    def link(self, crash: str = "") -> Link:
        """``crash``: a crash point that the node program and what it starts die or stop at."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.root), **({"UGRO_CRASH_POINT": crash} if crash else {})}
        link = self.wait(Link.open(self.spec, SshOptions(), timeout_s=_OPEN_S, env=env))
        self._links.append(link)
        return link

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def call(self, link: Link, method: str, timeout_s: float = 60, **params: Any) -> dict[str, Any]:
        return self.wait(self.acall(link, method, timeout_s, **params))

    async def acall(self, link: Link, method: str, timeout_s: float = 60, **params: Any) -> dict[str, Any]:
        if method in ("start", "remove") and "runs" not in params:
            return await self._call_with_one(link, method, timeout_s, params)
        return await link.call(f"runs.{method}", self.params(**params), timeout_s=timeout_s)

    async def _call_with_one(self, link: Link, method: str, timeout_s: float, params: dict[str, Any]) -> dict[str, Any]:
        """A list of one run: its answer, or its error."""
        run: Any = params if method == "start" else [params["job"], params["attempt"]]
        answer = await link.call(f"runs.{method}", self.params(runs=[run]), timeout_s=timeout_s)
        [result] = answer["results"]
        if "error" in result:
            raise RemoteFailure(result["error"]["message"], cause=result["error"]["kind"])
        return {"now": answer["now"], **result}

    def params(self, **params: Any) -> dict[str, Any]:
        return {"agent": AGENT, "generation": self.generation, **params}

    def pids(self) -> list[int]:
        """The node programs of this node, and their forked helpers; not its supervisors and ranks."""
        return [
            pid
            for pid in processes_with_variable("HOME", [str(self.root)])
            if not _variable(pid, "UGRO_RUN") and is_alive(pid)
        ]

    def kill_programs(self) -> None:
        """All at one instant: one that outlived another would see it go, and tidy up."""
        doomed = self.pids()
        signal_all(signal.SIGSTOP, doomed)
        signal_all(signal.SIGKILL, doomed)

    def close(self) -> None:
        try:
            for link in self._links:
                link.close()
            self.wait(_all_closed(self._links))
        finally:
            self._runner.close()
            end_all_with_variable(MARK, [str(self.root)])

    # --- what is on its disk, and who runs ----------------------------------------------------------------------

    def run_dir(self, job: str, attempt: int) -> Path:
        return agent_folder(self.root.resolve(), self.spec.name) / "runs" / f"{job}.{attempt}"

    def runs(self) -> list[dict[str, Any]]:
        """The status of every run, as its files say."""
        agent = AgentDir(str(self.root), AGENT, node_key(self.spec.name))
        return [run.status() for run in agent.runs()] if os.path.isdir(agent.runs_path) else []

    def supervisors(self, job: str, attempt: int) -> list[int]:
        """The one that has the run, if it lives."""
        spec = durable.read_json(str(self.run_dir(job, attempt) / "spec.json")) or {}
        pid = ProcessName.parse(spec["supervisor"]).pid if "supervisor" in spec else 0
        return [pid] if pid and is_alive(pid) else []

    def kill_supervisor(self, job: str, attempt: int) -> None:
        """With its reaper, which would end what it leaves; at one instant, else each would see the other go."""
        doomed = [self.reaper(job, attempt), self.supervisor(job, attempt)]
        signal_all(signal.SIGSTOP, doomed)
        signal_all(signal.SIGKILL, doomed)

    def reaper(self, job: str, attempt: int) -> int:
        """Of the run's supervisor; the latest, if there were several."""
        spec = durable.read_json(str(self.run_dir(job, attempt) / "spec.json")) or {}
        folder = agent_folder(self.root.resolve(), self.spec.name) / "supervisors" / spec["supervisor"]
        return ProcessName.parse((folder / "reaper").read_text()).pid

    def supervising(self) -> list[int]:
        """All supervisors of this node, and their reapers."""
        found = processes_with_variable("UGRO_RUN", [f"{AGENT}/supervisor"])
        return [pid for pid in found if is_alive(pid) and _variable(pid, MARK).endswith(f"={self.root}".encode())]

    def supervisor(self, job: str, attempt: int) -> int:
        return wait_until(lambda: self.supervisors(job, attempt), 10, "a supervisor")[0]

    def stopped(self) -> list[int]:
        """Processes of this node that stand still at a crash point."""
        everyone = processes_with_variable(MARK, [str(self.root)]) + self.pids()
        return [pid for pid in {*everyone, *descendants(everyone)} if _state(pid) == "T"]

    async def stopped_at(self, point: str, task: asyncio.Task[Any]) -> list[int]:
        """The process that reached the point and stands still there, while ``task`` goes on."""
        async with asyncio.timeout(_OPEN_S):
            while not (found := self.stopped()):
                assert not task.done(), f"it never came to {point}: {task.result()}"
                await asyncio.sleep(0.01)
        return found

    async def kill_all_that_stop(self, task: asyncio.Task[Any]) -> None:
        """Also the process that is started in the place of one that was killed, while ``task`` goes on."""
        async with asyncio.timeout(_OPEN_S):
            while not task.done():
                signal_all(signal.SIGKILL, self.stopped())
                await asyncio.sleep(0.01)

    def let_go(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def _all_closed(links: list[Link]) -> None:
    for link in links:
        await link.wait_closed()


def _variable(pid: int, name: str) -> bytes:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((entry for entry in entries if entry.startswith(name.encode() + b"=")), b"")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
