"""Nodes of this machine and a home for what comes of them: the ground that tests of checkpoints stand on.

Run as a program, it is an agent that brings a checkpoint home, to be killed or to be weighed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.rig.clock import RigClock
from tests.rig.nodeprogram import AGENT, agent_folder
from tests.rig.waiting import end_all_with_variable, processes_with_variable, signal_all, stop_trees
from ugro.kernel.files.results.checkpoints import CheckpointSync
from ugro.kernel.jobs.model import Checkpoint, Job, JobSpec, JobState
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Dialling, Identity, Node
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import NotFound

MARK = "TEST_CHECKPOINT_NODE"
LONG_AGO = "2020-01-01T00:00:00+00:00"


class Rig:
    """Nodes of this machine, each with its own folder, and a home for an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "jobs"
        self.specs: dict[str, NodeSpec] = {}
        self.lost: set[str] = set()
        self.clocks: dict[str, RigClock] = {}
        self.told: list[str] = []  # what users hear of their jobs

    def root(self, node: str) -> Path:
        return self.folder / node

    def written(self, node: str, job: int = 7) -> Path:
        """Where what earlier attempts wrote is between two attempts."""
        path = agent_folder(self.root(node), node) / "checkpoints" / str(job)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def workdir(self, node: str, attempt: int, job: int = 7) -> Path:
        """Of a run: where the folder of its checkpoints is."""
        return agent_folder(self.root(node), node) / "runs" / f"{job}.{attempt}" / "work"

    def resumed(self, node: str, job: int = 7) -> Path:
        return agent_folder(self.root(node), node) / "resume" / str(job)

    def kept(self, job: int = 7) -> Path:
        return self.home / str(job) / ".checkpoints"

    def programs(self, node: str) -> list[int]:
        return processes_with_variable(MARK, [str(self.root(node))])

    def kill_programs(self, node: str) -> None:
        """All at one instant: one that outlived another would see it go, and tidy up."""
        signal_all(signal.SIGKILL, stop_trees(self.programs(node)))

    @asynccontextmanager
    async def agent(self, *names: str, generation: int = 1) -> AsyncIterator[CheckpointSync]:
        nodes = {name: self.node(name) for name in names}

        def known(name: str) -> Node:
            if name not in nodes or name in self.lost:
                raise NotFound(f"no node {name}")
            return nodes[name]

        async def tell(job: Job, text: str) -> None:
            self.told.append(text)

        checkpoints = CheckpointSync(self.home, known, Identity(AGENT, generation), tell)
        try:
            yield checkpoints
        finally:
            await checkpoints.close()
            await asyncio.gather(*(node.close() for node in nodes.values()))

    def node(self, name: str) -> Node:
        root = self.root(name)
        root.mkdir(exist_ok=True)
        spec = self.specs.get(name, NodeSpec(name, remote_root=str(root), python=sys.executable, transport="local"))
        own = self.clocks[name].env if name in self.clocks else {}
        dialling = Dialling(SshOptions(5.0), 3, asyncio.Semaphore(10), lambda: {MARK: str(root), **own})
        return Node(spec, dialling)

    def close(self) -> None:
        end_all_with_variable(MARK, [str(path) for path in self.folder.iterdir()])


@contextmanager
def nodes_and_home() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as folder:
        rig = Rig(Path(folder).resolve())
        try:
            yield rig
        finally:
            rig.close()


def job(attempt: int = 1, *, directory: str | None = None, cwd: str | None = None, submitted: str = LONG_AGO) -> Job:
    spec = JobSpec("train", ("python", "train.py"), cwd=cwd, checkpoint=Checkpoint(dir=directory))
    return Job(7, spec, "ann", JobState.RUNNING, "", submitted, attempt)


def write(folder: Path, name: str, content: bytes = b"weights") -> None:
    """As a program should: under another name first."""
    fresh = folder / f"{name}.tmp"
    (fresh / "shard").mkdir(parents=True)
    (fresh / "shard" / "weights.bin").write_bytes(content)
    (fresh / "step.txt").write_text(name)
    fresh.rename(folder / name)


def contents(folder: Path | str) -> dict[str, bytes]:
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


async def name_at_home(checkpoints: CheckpointSync) -> str | None:
    newest = await checkpoints.newest(7)
    return newest.name if newest else None


async def is_home(checkpoints: CheckpointSync, name: str) -> None:
    async with asyncio.timeout(20):
        while await name_at_home(checkpoints) != name:  # noqa: ASYNC110  # files tell nobody
            await asyncio.sleep(0.05)


async def main(folder: str, task: str) -> None:
    """An agent in a process of its own, to be killed or to be weighed."""
    rig = Rig(Path(folder))
    async with rig.agent("n1", "n2") as checkpoints:
        await checkpoints.collect(job(1), [])
        await checkpoints.place(job(1), "n2")
        before = _memory_bytes()
        most = before

        async def weigh() -> None:
            nonlocal most
            while True:
                most = max(most, _memory_bytes())
                await asyncio.sleep(0.01)

        weighing = asyncio.create_task(weigh())
        await checkpoints.collect(job(1), ["n1"])
        if task == "place":
            placed = await checkpoints.place(job(2), "n2")
            sys.stdout.write(f"{placed.resume} {most - before}")
        weighing.cancel()


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
