"""One SQLite connection in one thread. Changes that arrive together share one durable commit.

A change is acknowledged after its commit is on disk (synchronous FULL). If one fails, only that one is rolled back.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from ugro.core.errors import Damaged, UgroError
from ugro.store.examine import Examined, Thoroughness, damaged, examine, is_corruption, unusable

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


@dataclass(slots=True)
class _Request:
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    then: Callable[[Any], None] | None = None
    counts: bool = True
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


# Clients wait twice as long for the agent. What such a check does not reach is checked in the first backup.
THOROUGH = Thoroughness("integrity_check", limit_s=15.0)


@dataclass(frozen=True, slots=True)
class Design:
    """What a database is to look like."""

    migrations: str = "ugro.store"  # the package with a folder of that name, which holds the steps to the newest schema
    tables: tuple[str, ...] = ("meta", "jobs", "attempts", "events")  # some of those that it must have
    # How to look at it before it is used; None: somebody else has done so.
    how: Thoroughness | None = THOROUGH


@dataclass(frozen=True, slots=True)
class Opening:
    """What is called while a database is opened."""

    on_progress: Callable[[str], None] = lambda text: None
    # With what was found, before anything is written; may raise.
    on_examined: Callable[[Examined], None] = lambda found: None


class Database:
    def __init__(self, path: Path, design: Design | None = None) -> None:
        self.path = path
        self._design = design or Design()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="database", daemon=True)
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None  # of the file that the connection has open
        self.damage: Damaged | None = None  # found while it was in use; nothing is read or written from then on
        self.advise: Callable[[], str | None] = lambda: None  # a hint for that error
        self._minor_changes = 0
        self.changes = 0  # rows that were changed and are durable, of changes that count

    async def open(self, opening: Opening | None = None) -> None:
        """Refuses a damaged file, before anything is written."""
        if (how := self._design.how) is not None:
            await asyncio.to_thread(self._examine, how, opening or Opening())
        self._thread.start()
        await self.run(self._migrate)

    def refuse(self, what: str) -> None:
        """Stops all use: the file is damaged."""
        if self.damage is None:
            self.damage = damaged(self.path, what, self.advise())
            log.error("%s; nothing more is written to it; %s", self.damage, self.damage.hint)

    async def close(self) -> None:
        self._requests.put(None)
        if self._thread.ident is None:  # it was not opened
            return
        await asyncio.to_thread(self._thread.join, 10)

    async def run(self, work: Work[T], then: Callable[[T], None] | None = None, *, counts: bool = True) -> T:
        """Runs ``work`` in a transaction and returns when it is durable. A read costs no sync.

        ``then`` is called with the result in the order of the transactions, even if the caller was cancelled.
        ``counts``: False for what an idle agent writes now and then, too.
        """
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future(), then, counts)
        self._requests.put(request)
        try:
            result: T = await request.done
        except sqlite3.DatabaseError as error:
            raise unusable(self.path, error) from error
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

    def _examine(self, how: Thoroughness, opening: Opening) -> None:
        try:
            found = examine(self.path, self._design.tables, how, opening.on_progress)
        except Damaged as error:
            error.hint = "; or ".join(filter(None, (self.advise(), error.hint)))
            raise
        if not found.is_checked:
            log.info("%s is large: its check was ended after %g s", self.path, how.limit_s)
        if found.schema > newest_schema(self._design.migrations):
            raise UgroError(
                f"{self.path} was written by a newer UGRO (schema {found.schema})",
                hint="upgrade ugro on this machine",
            )
        opening.on_examined(found)

    def _run_together(self, batch: list[_Request]) -> None:
        if self.damage is not None:
            self._refuse_all(batch)
            return
        try:
            connection = self._connection or self._connect()
            connection.execute("BEGIN")
            minor = 0
            for request in batch:
                before = connection.total_changes
                outcome = _done_or_undone(connection, request.work)
                if isinstance(outcome, Exception):
                    request.error = outcome
                else:
                    request.result = outcome
                minor += 0 if request.counts else connection.total_changes - before
            connection.execute("COMMIT")
            self._refuse_if_removed(batch)
            self._minor_changes += minor
            self.changes = connection.total_changes - self._minor_changes
        except (sqlite3.Error, OSError) as error:
            # The commit did not happen: nothing of this batch may be acknowledged.
            for request in batch:
                request.error = request.error or error
            self._roll_back()
            if is_corruption(error):
                self.refuse(str(error))
                self._refuse_all(batch)

    def _connect(self) -> sqlite3.Connection:
        self._connection = _connect(self.path)
        self._inode = _inode(self.path)
        return self._connection

    def _refuse_if_removed(self, batch: list[_Request]) -> None:
        """SQLite goes on writing to a file that has no name any more: nothing of that may be acknowledged."""
        if self._inode is not None and _inode(self.path) not in (self._inode, None):
            self.refuse("it was removed or replaced while it was in use")
            self._refuse_all(batch)

    def _refuse_all(self, batch: list[_Request]) -> None:
        assert self.damage is not None
        for request in batch:
            request.error = Damaged(self.damage.message, hint=self.damage.hint)

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # the next batch opens a new connection
            self._connection = None

    def _migrate(self, connection: sqlite3.Connection) -> None:
        done = int(connection.execute("PRAGMA user_version").fetchone()[0])
        for number, sql in sorted(_migrations(self._design.migrations).items()):
            if number > done:
                for statement in _statements(sql):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")


def newest_schema(package: str) -> int:
    return max(_migrations(package))


def _inode(path: Path) -> int | None:
    """0: there is no such file. None: the disk does not answer now, which says nothing."""
    try:
        return path.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:
        return None


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
    except Exception as error:  # the caller gets it; the thread must serve the others
        if is_corruption(error):
            raise  # what the others wrote cannot be trusted either
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
