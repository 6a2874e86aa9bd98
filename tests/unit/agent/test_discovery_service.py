"""The loop over machines that are found, with a real store and a real program as their source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ugro.features.discovery.model import Candidate, Standing
from ugro.features.discovery.service import Discovery, Members, Ties
from ugro.kernel.config.load import parse_config
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal

LIMIT_S = 20
FILE = "discovery: {command: [echo, '[]'], join: auto, leave_after: 0, match: ['gpu*']}\n"


async def nothing() -> None:
    pass


@asynccontextmanager
async def discovery(
    folder: Path, *names: str, is_sleeping: Callable[[str], bool]
) -> AsyncIterator[tuple[Discovery, Any]]:
    """Nodes that have joined, and that their source no longer lists."""
    store = Store(folder / "state.db")
    await store.open()
    try:
        for name in names:
            await store.discovered.put(Candidate(name, "10.0.0.1", sources=("command",)))

        class NoNodes(list[Any]):
            ssh_config = None

        config = parse_config(FILE, folder / "cluster.yaml", {})
        cluster: Any = SimpleNamespace(config=config, inventory=NoNodes(), take_up_found=nothing)
        health: Any = SimpleNamespace(second_names=dict)
        examiner: Any = SimpleNamespace(trusted=ChangeSignal())
        members = Members(store.discovered)
        made = Discovery(members, cluster, health, examiner, Ties(lambda: True, is_sleeping, lambda unkept: unkept))
        await members.load()
        try:
            yield made, cluster
        finally:
            await made._close()
    finally:
        await store.close()


async def remain(made: Discovery, *expected: str) -> None:
    """Looks until only these are nodes; they are as they were."""
    nodes: dict[str, Standing] | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while nodes is None or nodes.keys() != set(expected):
                nodes = {one.candidate.name: one.standing for one in (await made.look()).found}
    except TimeoutError:
        raise AssertionError(f"expected {expected}, last seen: {nodes}") from None
    assert set(nodes.values()) <= {Standing.JOINED}


def test_a_node_that_sleeps_stays_while_one_that_is_awake_goes(tmp_path: Path) -> None:
    async def test() -> None:
        asleep = {"gpu1"}
        async with discovery(tmp_path, "gpu1", "gpu2", is_sleeping=asleep.__contains__) as (made, _):
            await remain(made, "gpu1")
            asleep.clear()
            await remain(made)

    asyncio.run(test())


def test_a_node_that_sleeps_goes_when_match_leaves_it_out(tmp_path: Path) -> None:
    async def test() -> None:
        async with discovery(tmp_path, "gpu1", "gpu2", is_sleeping=lambda name: True) as (made, cluster):
            cluster.config = parse_config(FILE.replace("gpu*", "gpu1"), tmp_path / "cluster.yaml", {})
            await remain(made, "gpu1")

    asyncio.run(test())
