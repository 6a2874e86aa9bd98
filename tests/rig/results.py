"""Runs on nodes of this machine whose outputs come home: the ground that tests of results stand on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.rig.checkpoints import Rig, nodes_and_home
from tests.rig.nodeprogram import AGENT, agent_folder
from ugro.kernel.files.results.output_sync import OutputSync
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.support.errors import NotFound


class ResultRig:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.home = rig.home

    def run(self, node: str, job: int = 7, attempt: int = 1) -> Path:
        """The folder of a run that is over, as far as outputs are concerned."""
        path = agent_folder(self.rig.root(node), node) / "runs" / f"{job}.{attempt}"
        for name in ("output", "work"):
            (path / name).mkdir(parents=True, exist_ok=True)
        return path

    def specify(self, node: str, *patterns: str, **more: object) -> None:
        spec = {"ranks": [{"rank": 0, "argv": ["x"]}], "outputs": list(patterns), **more}
        (self.run(node) / "spec.json").write_text(json.dumps({"spec": spec}))

    def output(self, node: str) -> Path:
        return self.run(node) / "output"

    def kept(self, node: str) -> Path:
        return agent_folder(self.rig.root(node), node) / "kept"

    def here(self, job: int = 7, attempt: int = 1) -> Path:
        return self.home / str(job) / f"attempt_{attempt}"

    @asynccontextmanager
    async def agent(self, *names: str) -> AsyncIterator[OutputSync]:
        nodes = {name: self.rig.node(name) for name in names}

        def known(name: str) -> Node:
            if name not in nodes:
                raise NotFound(f"no node {name}")
            return nodes[name]

        results = OutputSync(self.home, known, Identity(AGENT, 1))
        try:
            yield results
        finally:
            await results.close()
            await asyncio.gather(*(node.close() for node in nodes.values()))


@contextmanager
def runs_and_home() -> Iterator[ResultRig]:
    with nodes_and_home() as rig:
        yield ResultRig(rig)


async def nothing() -> None:
    return
