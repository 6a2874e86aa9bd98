"""One SQLite connection in one thread. Changes that arrive together share one durable commit.

A change is acknowledged after its commit is on disk (synchronous FULL). If one fails, only that one is rolled back.
"""

from __future__ import annotations

import asyncio
import queue
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from ugro.core.errors import UgroError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


@dataclass(slots=True)
class _Request:
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    then: Callable[[Any], None] | None = None
    result: Any = None
    error: BaseException | None = None

    def resolve(self) -> None:
        if self.then is not None and self.error is None:
            self.then(self.result)
        if self.done.done():  # the caller was cancelled; the change stands
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Database:
    def __init__(self, path: Path, migrations: str = "ugro.store") -> None:
        """``migrations``: the package with a folder of that name, which holds the steps to the newest schema."""
        self.path = path
        self._steps = migrations
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="database", daemon=True)
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        self._thread.start()
        await self.run(self._migrate)

    async def close(self) -> None:
        self._requests.put(None)
        await asyncio.to_thread(self._thread.join, 10)

    async def run(self, work: Work[T], then: Callable[[T], None] | None = None) -> T:
        """Runs ``work`` in a transaction and returns when it is durable. A read costs no sync.

        ``then`` is called with the result in the order of the transactions, even if the caller was cancelled.
        """
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future(), then)
        self._requests.put(request)
        try:
            result: T = await request.done
        except sqlite3.DatabaseError as error:
            raise UgroError(
                f"the state in {self.path} cannot be used: {error}",
                hint="is the disk full or the file damaged? Acknowledged changes are not lost",
            ) from error
        return result

    async def run_each(self, works: Iterable[Work[T]], then: Callable[[T], None]) -> list[T | Exception]:
        """Many small changes in one commit; each is applied or rolled back alone."""
        each = list(works)

        def notify(outcomes: list[T | Exception]) -> None:
            for outcome in outcomes:
                if not isinstance(outcome, Exception):
                    then(outcome)

        return await self.run(lambda db: [_done_or_undone(db, work) for work in each], then=notify)

    def _serve(self) -> None:
        while (first := self._requests.get()) is not None:
            batch = [first]
            is_last = False
            while not self._requests.empty() and len(batch) < 1000:
                request = self._requests.get()
                if request is None:
                    is_last = True
                    break
                batch.append(request)
            self._run_together(batch)
            for loop, requests in _by_loop(batch).items():
                loop.call_soon_threadsafe(_resolve, requests)
            if is_last:
                break
        if self._connection is not None:
            self._connection.close()

    def _run_together(self, batch: list[_Request]) -> None:
        try:
            connection = self._connection = self._connection or _connect(self.path)
            connection.execute("BEGIN")
            for request in batch:
                outcome = _done_or_undone(connection, request.work)
                if isinstance(outcome, Exception):
                    request.error = outcome
                else:
                    request.result = outcome
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            # The commit did not happen: nothing of this batch may be acknowledged.
            for request in batch:
                request.error = request.error or error
            self._roll_back()

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # the next batch opens a new connection
            self._connection = None

    def _migrate(self, connection: sqlite3.Connection) -> None:
        done = int(connection.execute("PRAGMA user_version").fetchone()[0])
        steps = sorted(_migrations(self._steps).items())
        if steps and done > steps[-1][0]:
            raise UgroError(
                f"the state in {self.path} was written by a newer UGRO (schema {done})",
                hint="upgrade ugro on this machine",
            )
        for number, sql in steps:
            if number > done:
                for statement in _statements(sql):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    path.chmod(0o600)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 5000"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _done_or_undone(connection: sqlite3.Connection, work: Work[T]) -> T | Exception:
    connection.execute("SAVEPOINT work")
    outcome: T | Exception
    try:
        outcome = work(connection)
    except Exception as error:  # noqa: BLE001  # the caller gets it; the thread must serve the others
        outcome = error
        connection.execute("ROLLBACK TO work")
    connection.execute("RELEASE work")
    return outcome


def _by_loop(batch: list[_Request]) -> dict[asyncio.AbstractEventLoop, list[_Request]]:
    loops: dict[asyncio.AbstractEventLoop, list[_Request]] = {}
    for request in batch:
        loops.setdefault(request.loop, []).append(request)
    return loops


def _resolve(requests: list[_Request]) -> None:
    for request in requests:
        request.resolve()


def _migrations(package: str) -> dict[int, str]:
    folder = resources.files(package) / "migrations"
    found = {}
    for entry in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name):
            found[int(match[1])] = entry.read_text()
    return found


def _statements(sql: str) -> list[str]:
    """In our migrations a semicolon only ends a statement. ``executescript`` would commit on its own."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]
