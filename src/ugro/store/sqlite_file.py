"""One SQLite file. A change is acknowledged after its commit is on disk (synchronous FULL)."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from ugro.core.errors import UgroError
from ugro.store.backend import ConnectionLost, Design, Opening, too_new
from ugro.store.connection import Connection
from ugro.store.examine import Examined, examine, is_corruption, unusable
from ugro.store.migrations_folder import migrations, newest_schema, statements
from ugro.store.reserve import Reserve

log = logging.getLogger(__name__)


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
