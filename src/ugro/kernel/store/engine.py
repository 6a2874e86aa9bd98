"""One connection in one thread. Changes that arrive together share one durable commit.

A change is acknowledged after its commit is durable. If one fails, only that one is rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ugro.kernel.store.connection import (
    THOROUGH,
    Backend,
    Connection,
    ConnectionLost,
    Design,
    Opening,
    Work,
    migrations,
    newest_schema,
    statements,
    too_new,
)
from ugro.kernel.store.examine import Examined, damaged, examine, is_corruption, unusable
from ugro.kernel.support.errors import Damaged, StoreAway, UgroError
from ugro.node import durable
from ugro.node.machine import free_bytes

# --- space that is kept for the state ---------------------------------------------------------------------------------
# Space on the agent's disk is taken while there is enough, and given back when the disk is full. This does not keep a
# disk from filling up: what writes files that can wait, such as collected ones, asks ``is_short``.


log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
PIECES = 16  # one gives room for some hundred changes of the state
LEAST_BYTES = 32 << 20  # with less that is free, only the state is written


def is_short(folder: Path) -> bool:
    """Whether what can wait must not be written there. Blocks."""
    try:
        return free_bytes(str(folder)) < LEAST_BYTES
    except OSError:  # it is not there yet
        return False


class Reserve:
    """Files of one piece each. Used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changing = threading.Lock()

    @property
    def bytes_left(self) -> int:
        return sum(self._piece(number).exists() for number in range(PIECES)) * PIECE_BYTES

    @property
    def free_bytes(self) -> int:
        """What is free on its disk besides."""
        return free_bytes(str(self.folder.parent))

    def take(self) -> None:
        """Takes what is missing, as long as that leaves enough to others. Blocks."""
        with self._changing:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                missing = [piece for piece in map(self._piece, range(PIECES)) if not piece.exists()]
                for piece in missing:
                    if self.free_bytes < LEAST_BYTES + PIECE_BYTES:
                        return
                    part = piece.with_suffix(".part")
                    durable.take_space(str(part), PIECE_BYTES)
                    part.rename(piece)
            except OSError as error:
                log.warning("no space can be kept for the state: %s", error)

    def give(self) -> bool:
        """Frees one piece, because the state could not be written; False if none is left. Blocks."""
        with self._changing:
            for number in reversed(range(PIECES)):
                try:
                    self._piece(number).unlink()
                except OSError:
                    continue
                log.warning("the disk of %s is full: the state uses the space kept for it", self.folder.parent)
                return True
            return False

    def _piece(self, number: int) -> Path:
        return self.folder / f"{number:02}"


# --- one SQLite file --------------------------------------------------------------------------------------------------
# A change is acknowledged after its commit is on disk (synchronous FULL).


# Of a full disk, or a quota that is used up: for its files of the log, too.
_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_CANTOPEN")


class _Replaced(sqlite3.DatabaseError):
    """The file that is written to is no longer the one of that name."""


class SqliteConnection(sqlite3.Connection):
    def newest_id(self, table: str, column: str = "id") -> int:
        row = self.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        return int(row[0]) if row is not None else 0

    def raise_ids(self, table: str, to: int, column: str = "id") -> None:
        if to > self.newest_id(table):
            self.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
            self.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, to))


class SqliteFile:
    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    problem: str | None = None  # a file does not go away for a while
    look_every_s: float | None = None

    def __init__(self, path: Path, design: Design, reserve: Reserve | None = None) -> None:
        self.path = path
        self._reserve = reserve
        self._design = design
        self._connection: SqliteConnection | None = None
        self._inode: int | None = None  # of the file that the connection has open

    @property
    def name(self) -> str:
        return str(self.path)

    def examine(self, opening: Opening) -> Examined | None:
        """Refuses a damaged file, before anything is written."""
        if (how := self._design.how) is None:
            return None
        found = examine(self.path, self._design.tables, how, opening.on_progress)
        if not found.is_checked:
            log.info("%s is large: its check was ended after %g s", self.path, how.limit_s)
        if found.schema > newest_schema(self._design.migrations):
            raise too_new(self.name, found.schema)
        return found

    def begin(self) -> SqliteConnection:
        connection = self._connection or self._connect()
        connection.execute("BEGIN")
        return connection

    def commit(self) -> None:
        assert self._connection is not None
        self._connection.execute("COMMIT")
        # SQLite goes on writing to a file that has no name any more: nothing of that may be acknowledged.
        if self._inode is not None and _inode(self.path) not in (self._inode, None):
            raise _Replaced("it was removed or replaced while it was in use")

    def roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # the next batch opens a new connection
            self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def look(self) -> None:
        return

    def recover(self, lost: ConnectionLost) -> bool:
        raise AssertionError("a file has no connection to lose")

    def give_up(self) -> None:
        return

    def migrate(self, db: Connection) -> None:
        migrate(db, self._design.migrations)

    def is_fatal(self, error: Exception) -> bool:
        """What the others of the same commit wrote cannot be trusted either."""
        return is_corruption(error) or (_may_be_full(error) and self._reserve is not None)

    def makes_room(self, error: Exception) -> bool:
        return _may_be_full(error) and self._reserve is not None and self._reserve.give()

    def damage_in(self, error: Exception) -> str | None:
        return str(error) if is_corruption(error) or isinstance(error, _Replaced) else None

    def unusable(self, error: Exception) -> UgroError:
        assert isinstance(error, sqlite3.Error)
        return unusable(self.path, error)

    def _connect(self) -> SqliteConnection:
        self._connection = connect(self.path)
        self._inode = _inode(self.path)
        return self._connection


def migrate(db: Connection, package: str, newest: int | None = None) -> None:
    """``newest``: None for the newest schema that there is."""
    done = int(db.execute("PRAGMA user_version").fetchone()[0])
    for number, sql in sorted(migrations(package).items()):
        if number > done and (newest is None or number <= newest):
            for statement in statements(sql):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")


def connect_plainly(path: Path) -> SqliteConnection:
    connection: SqliteConnection = sqlite3.connect(path, isolation_level=None, factory=SqliteConnection)
    connection.row_factory = sqlite3.Row
    return connection


def connect(path: Path) -> SqliteConnection:
    connection = connect_plainly(path)
    path.chmod(0o600)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 5000"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _may_be_full(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "") in _FULL


def _inode(path: Path) -> int | None:
    """0: there is no such file. None: the disk does not answer now, which says nothing."""
    try:
        return path.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:
        return None


# --- the thread that writes -------------------------------------------------------------------------------------------


__all__ = ["THOROUGH", "Database", "Design", "Opening", "Work", "newest_schema"]

T = TypeVar("T")
_AWAY = "the agent waits for it, and jobs on the nodes keep running; see: ugro agent status"


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


class Database:
    def __init__(self, at: Path | Backend, design: Design | None = None, reserve: Reserve | None = None) -> None:
        """``at``: a file of SQLite, or what is used instead. ``reserve``: space for it when its disk is full."""
        self._backend: Backend = SqliteFile(at, design or Design(), reserve) if isinstance(at, Path) else at
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="database", daemon=True)
        self.damage: Damaged | None = None  # found while it was in use; nothing is read or written from then on
        self.advise: Callable[[], str | None] = lambda: None  # a hint for that error
        self._minor_changes = 0
        self.changes = 0  # rows that were changed and are durable, of changes that count

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def problem(self) -> StoreAway | None:
        """Set while nothing can be read or written: all who ask wait, until it can."""
        what = self._backend.problem
        return StoreAway(f"{self.name} does not answer: {what}", hint=_AWAY) if what is not None else None

    async def open(self, opening: Opening | None = None) -> None:
        """Refuses what cannot be used, before anything is written."""
        await asyncio.to_thread(self._examine, opening or Opening())
        self._thread.start()
        await self.run(self._backend.migrate)

    def refuse(self, what: str) -> None:
        """Stops all use: it is damaged."""
        if self.damage is None:
            self.damage = damaged(self.name, what, self.advise())
            log.error("%s; nothing more is written to it; %s", self.damage, self.damage.hint)

    def give_up(self) -> None:
        """The agent stops: who waits for a lost connection, or would, gets an error."""
        self._backend.give_up()

    async def close(self) -> None:
        self._backend.give_up()
        self._requests.put(None)
        if self._thread.ident is None:  # it was not opened
            await asyncio.to_thread(self._backend.close)
            return
        await asyncio.to_thread(self._thread.join, 10)

    async def run(self, work: Work[T], then: Callable[[T], None] | None = None, *, counts: bool = True) -> T:
        """Runs ``work`` in a transaction and returns when it is durable. A read costs no sync.

        ``work`` may be run again, if it is certain that nothing of it was committed. ``then`` is called with the result
        in the order of the transactions, even if the caller was cancelled. ``counts``: False for what an idle agent
        writes now and then, too.
        """
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future(), then, counts)
        self._requests.put(request)
        try:
            result: T = await request.done
        except self._backend.errors as error:
            raise self._backend.unusable(error) from error
        return result

    async def run_each(self, works: Iterable[Work[T]], then: Callable[[T], None]) -> list[T | Exception]:
        """Many small changes in one commit; each is applied or rolled back alone."""
        each = list(works)

        def notify(outcomes: list[T | Exception]) -> None:
            for outcome in outcomes:
                if not isinstance(outcome, Exception):
                    then(outcome)

        return await self.run(lambda db: [self._done_or_undone(db, work) for work in each], then=notify)

    def _serve(self) -> None:
        while (first := self._next()) is not None:
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
        self._backend.close()

    def _next(self) -> _Request | None:
        while True:
            try:
                return self._requests.get(timeout=self._backend.look_every_s)
            except queue.Empty:
                self._look()

    def _look(self) -> None:
        """Nobody asks for anything: a lost connection is noticed and replaced all the same."""
        try:
            self._backend.look()
        except ConnectionLost as lost:
            with contextlib.suppress(UgroError):  # it was given up, which the next request is told
                self._backend.recover(lost)

    def _examine(self, opening: Opening) -> None:
        try:
            found = self._backend.examine(opening)
        except Damaged as error:
            error.hint = "; or ".join(filter(None, (self.advise(), error.hint)))
            raise
        if found is not None:
            opening.on_examined(found)

    def _run_together(self, batch: list[_Request]) -> None:
        if self.damage is not None:
            self._refuse_all(batch)
            return
        failures: tuple[type[Exception], ...] = (*self._backend.errors, OSError, UgroError)
        try:
            self._run_until_known(batch)
        except failures as error:
            # The commit did not happen: nothing of this batch may be acknowledged.
            for request in batch:
                request.error = request.error or error
            self._backend.roll_back()
            if (what := self._backend.damage_in(error)) is not None:
                self.refuse(what)
                self._refuse_all(batch)

    def _run_until_known(self, batch: list[_Request]) -> None:
        """Again only if it is certain that nothing of it was committed."""
        while True:
            try:
                self._run_once(batch)
            except ConnectionLost as lost:
                if not self._backend.recover(lost):
                    continue
            except self._backend.errors as error:
                if not self._backend.makes_room(error):
                    raise
                self._backend.roll_back()
                continue
            return

    def _run_once(self, batch: list[_Request]) -> None:
        connection = self._backend.begin()
        minor = 0
        for request in batch:
            before = connection.total_changes
            outcome = self._done_or_undone(connection, request.work, is_alone=len(batch) == 1)
            request.error = outcome if isinstance(outcome, Exception) else None
            request.result = outcome
            minor += 0 if request.counts else connection.total_changes - before
        changes = connection.total_changes
        self._backend.commit()
        self._minor_changes += minor
        self.changes = changes - self._minor_changes

    def _refuse_all(self, batch: list[_Request]) -> None:
        assert self.damage is not None
        for request in batch:
            request.error = Damaged(self.damage.message, hint=self.damage.hint)

    def _done_or_undone(self, connection: Connection, work: Work[T], *, is_alone: bool = False) -> T | Exception:
        """``is_alone``: nothing else is in the transaction, so it needs no savepoint."""
        if not is_alone:
            connection.execute("SAVEPOINT work")
        outcome: T | Exception
        try:
            outcome = work(connection)
        except Exception as error:  # the caller gets it; the thread must serve the others
            if self._backend.is_fatal(error):
                raise
            outcome = error
            for statement in ("ROLLBACK", "BEGIN") if is_alone else ("ROLLBACK TO work",):
                connection.execute(statement)
        if not is_alone:
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
