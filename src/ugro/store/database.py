"""The agent's state on disk: SQLite, one connection in one thread, every change durable before it is acknowledged.

Nobody else opens the file for writing. Rows leave as the types of ``core``; SQL stays here.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TypeVar

from ugro.core.errors import UgroError

T = TypeVar("T")


class Store:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._run(self._open)

    async def close(self) -> None:
        await self._run(self._close)
        self._thread.shutdown()

    async def next_generation(self) -> int:
        """Counts agents: a node that has seen a later one refuses an earlier one."""
        return await self._run(self._next_generation)

    async def drain(self, node: str, reason: str) -> None:
        await self._write(
            "INSERT INTO drained_nodes (name, reason, drained_at) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET reason = excluded.reason, drained_at = excluded.drained_at",
            (node, reason, datetime.now(UTC).isoformat()),
        )

    async def resume(self, node: str) -> None:
        await self._write("DELETE FROM drained_nodes WHERE name = ?", (node,))

    async def drained(self) -> dict[str, str]:
        """Node names and the reason given for each."""
        return await self._run(
            lambda: dict(self._connection.execute("SELECT name, reason FROM drained_nodes").fetchall())
        )

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._database is not None, "the store is not open"
        return self._database

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.DatabaseError as error:
            raise UgroError(
                f"the state in {self._path} cannot be used: {error}",
                hint="is the disk full or the file damaged? Nothing that was acknowledged has been changed",
            ) from error

    async def _write(self, sql: str, values: tuple[str, ...]) -> None:
        def work() -> None:
            with self._connection:
                self._connection.execute(sql, values)

        await self._run(work)

    def _open(self) -> None:
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        self._path.chmod(0o600)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA foreign_keys = ON")
        self._migrate()

    def _migrate(self) -> None:
        done = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        steps = sorted(_migrations().items())
        if steps and done > steps[-1][0]:
            raise UgroError(
                f"the state in {self._path} is of a newer UGRO (schema {done})", hint="upgrade ugro on this machine"
            )
        for number, sql in steps:
            if number > done:
                self._connection.executescript(f"BEGIN; {sql} PRAGMA user_version = {number}; COMMIT;")

    def _next_generation(self) -> int:
        with self._connection:
            self._connection.execute(
                "INSERT INTO meta (key, value) VALUES ('generation', '1') "
                "ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
            )
            row = self._connection.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
        return int(row[0])

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _migrations() -> dict[int, str]:
    folder = resources.files("ugro.store") / "migrations"
    found = {}
    for entry in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name):
            found[int(match[1])] = entry.read_text()
    return found
