"""Stores on disk, opened for a test's work and closed after it, whatever came of it.

A test that asks ``store_at`` for its store can run on PostgreSQL, too: in a database that belongs to the file's name.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.rig.postgres import shared_server
from ugro.kernel.store.address import postgres_at, write_address
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.metricstore import MetricStore

ENGINES = ("sqlite", "postgres")
_engine = os.environ.get("UGRO_TEST_STORE", "sqlite")  # for tests that know nothing of it


class _Closable(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)


def current_engine() -> str:
    return _engine


@contextmanager
def on_engine(name: str) -> Iterator[None]:
    global _engine
    before, _engine = _engine, name
    try:
        yield
    finally:
        _engine = before


def store_at(path: Path) -> Store:
    return Store(path) if _engine == "sqlite" else Store(postgres_at(shared_server().address_of(path)))


def use_engine(home: Path) -> None:
    """The agent of a state directory does so, too; before its first start."""
    if _engine != "sqlite":
        write_address(StateDir(home), shared_server().address_of(home))


def where(path: Path) -> str:
    """A file, or a URL; for another process."""
    return str(path) if _engine == "sqlite" else shared_server().address_of(path).url


def sql(path: Path, statement: str) -> list[Any]:
    """Behind the store's back."""
    if _engine == "sqlite":
        with closing(sqlite3.connect(path)) as db, db:
            return db.execute(statement).fetchall()
    server = shared_server()
    return server.sql(statement, database=server.database_of(path))


def in_store(folder: Path, work: Callable[[Store], Awaitable[object]]) -> None:
    asyncio.run(_with(store_at(folder / "state.db"), work))


def in_metric_store(folder: Path, work: Callable[[MetricStore], Awaitable[None]]) -> None:
    asyncio.run(_with(MetricStore(folder / "metrics.db"), work))


async def _with(store: S, work: Callable[[S], Awaitable[object]]) -> None:
    await store.open()
    try:
        await work(store)
    finally:
        await store.close()
