"""How often a node that cannot be reached is dialled. Its transport is a command that fails, and counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ugro.kernel.jobs.engine.placed_runs import PlacedRuns
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Runs
from ugro.kernel.links.cluster import Inventory
from ugro.kernel.links.diagnosis import DENIED, NAME_NOT_FOUND
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Dialling, Identity, Node
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import Unreachable

_DENIES = 'echo dialled >> "$0"; echo "ann@gpu1: Permission denied (publickey)." >&2; exit 255'
_IS_DOWN = 'echo dialled >> "$0"; exit 3'
_NO_NAME = 'echo dialled >> "$0"; echo "ssh: Could not resolve hostname gpu1: Name not known" >&2; exit 255'


@contextlib.asynccontextmanager
async def failing(tmp_path: Path, name: str, script: str = _DENIES, *, rests: bool = False) -> AsyncIterator[Node]:
    """It was dialled once, a while ago."""
    spec = NodeSpec(name, remote_root=str(tmp_path), transport=("sh", "-c", script, str(tmp_path / "dials")))
    node = Node(spec, Dialling(SshOptions(), 0, asyncio.Semaphore(1), dict))
    node.is_resting = rests
    try:
        with pytest.raises(Unreachable):
            await node.ready(10)
        node._dialled_at -= 10
        yield node
    finally:
        await node.close()


def dials(tmp_path: Path) -> int:
    return len((tmp_path / "dials").read_text().splitlines())


async def ask(node: Node) -> None:
    """As what runs in the background does."""
    runs = Runs(node, Identity("agent", 1), 5.0, 5.0)
    with pytest.raises(Unreachable):
        async for _ in runs.watch():
            pass
    with pytest.raises(Unreachable):
        await runs.mark()


def test_background_work_does_not_dial_a_node_that_denies_the_login(tmp_path: Path) -> None:
    async def work() -> None:
        async with failing(tmp_path, "gpu1") as node:
            assert node.error is not None
            assert node.error.cause == DENIED
            await ask(node)
            assert dials(tmp_path) == 1
            with pytest.raises(Unreachable):
                await node.ready(10)
            assert dials(tmp_path) == 2, "for a person it is tried at once"

    asyncio.run(work())


def test_background_work_does_not_dial_a_node_that_sleeps(tmp_path: Path) -> None:
    async def work() -> None:
        async with failing(tmp_path, "gpu1", _IS_DOWN, rests=True) as node:
            await ask(node)
            assert dials(tmp_path) == 1
            node.is_resting = False
            await ask(node)
            assert dials(tmp_path) == 2

    asyncio.run(work())


def test_a_node_whose_name_was_not_found_for_a_moment_is_dialled_by_what_needs_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with failing(tmp_path, "gpu1", _NO_NAME) as node:
            assert node.error is not None
            assert node.error.cause == NAME_NOT_FOUND
            await ask(node)
            assert dials(tmp_path) == 2

    asyncio.run(work())


def test_a_denied_login_is_not_dialled_by_every_person_who_asks(tmp_path: Path) -> None:
    async def work() -> None:
        async with failing(tmp_path, "ann@gpu1") as node:
            for _ in range(3):
                with pytest.raises(Unreachable):
                    await node.ready(10)
            assert dials(tmp_path) == 1
            node._dialled_at -= 20
            with pytest.raises(Unreachable):
                await node.ready(10)
            assert dials(tmp_path) == 2

    asyncio.run(work())


def test_a_login_counts_as_refused_when_it_was_denied_again_after_a_minute(tmp_path: Path) -> None:
    async def work() -> None:
        async with failing(tmp_path, "ann@gpu1") as login:
            inventory = Inventory(dict)
            inventory._logins["ann@gpu1"] = login
            inventory._nodes["gpu1"] = cast(Any, SimpleNamespace(link=object()))
            watch = RunTracker(inventory, cast(Identity, None), cast(PlacedRuns, None))
            assert not watch.is_refused("ann@gpu1"), "a directory of accounts may fail for a moment"
            login._denied[0] -= 70
            assert not watch.is_refused("ann@gpu1"), "nobody has tried since"
            login._dialled_at -= 70
            with pytest.raises(Unreachable):
                await login.ready(10)
            assert watch.is_refused("ann@gpu1")
            assert watch.has_no_account("ann@gpu1")
            inventory.known_logins.unclear.add("ann@gpu1")
            assert not watch.has_no_account("ann@gpu1")
            inventory._nodes["gpu1"] = cast(Any, SimpleNamespace(link=None))
            assert not watch.is_refused("ann@gpu1"), "its node is away"

    asyncio.run(work())
