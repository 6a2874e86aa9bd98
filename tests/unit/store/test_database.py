"""The store: what was acknowledged is there afterwards, whatever ended in between."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rig.stores import store_at, where
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import UgroError

T = TypeVar("T")

_DRAIN_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from ugro.kernel.store.address import PostgresAddress
from ugro.kernel.store.database import Store
from ugro.kernel.store.address import postgres_at

async def main():
    is_url = sys.argv[1].startswith("postgresql:")
    store = Store(postgres_at(PostgresAddress(sys.argv[1])) if is_url else Path(sys.argv[1]))
    await store.open()
    await store.next_generation()
    await store.drain("gpu1", "fan is loud")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def in_store(file: Path, work: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = store_at(file)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def test_each_start_gets_the_next_generation(file: Path) -> None:
    assert [in_store(file, Store.next_generation) for _ in range(3)] == [1, 2, 3]


def test_a_drain_outlives_the_process_and_its_reason_can_change(file: Path) -> None:
    in_store(file, lambda store: store.drain("gpu1", "fan"))
    in_store(file, lambda store: store.drain("gpu1", "new fan"))
    in_store(file, lambda store: store.drain("gpu2", ""))
    assert in_store(file, Store.drained) == {"gpu1": "new fan", "gpu2": ""}


def test_a_resumed_node_is_not_drained_and_resuming_it_twice_is_no_error(file: Path) -> None:
    async def work(store: Store) -> dict[str, str]:
        await store.drain("gpu1", "fan")
        await store.resume("gpu1")
        await store.resume("gpu1")
        return await store.drained()

    assert in_store(file, work) == {}


@pytest.mark.parametrize("reason", ["Robert'); DROP TABLE drained_nodes;--", "zwei\nZeilen", "\0", "風扇"])
def test_any_text_can_be_a_reason(file: Path, reason: str) -> None:
    in_store(file, lambda store: store.drain("gpu1", reason))
    assert in_store(file, Store.drained) == {"gpu1": reason}


def test_what_was_acknowledged_survives_a_kill(file: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _DRAIN_AND_DIE, where(file)], timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert in_store(file, Store.drained) == {"gpu1": "fan is loud"}
    assert in_store(file, Store.next_generation) == 2


def test_changes_made_at_once_are_all_kept(file: Path) -> None:
    async def work(store: Store) -> dict[str, str]:
        await asyncio.gather(*(store.drain(f"gpu{number}", str(number)) for number in range(50)))
        return await store.drained()

    assert in_store(file, work) == {f"gpu{number}": str(number) for number in range(50)}


def test_nobody_else_can_read_the_file(file: Path) -> None:
    before = os.umask(0)
    try:
        in_store(file, Store.next_generation)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_state_of_a_newer_version_is_refused_and_left_alone(file: Path) -> None:
    in_store(file, Store.next_generation)
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 9999")
    database.close()
    before = file.read_bytes()
    with pytest.raises(UgroError, match="newer UGRO") as caught:
        in_store(file, Store.next_generation)
    assert "upgrade" in str(caught.value.hint)
    assert file.read_bytes() == before
