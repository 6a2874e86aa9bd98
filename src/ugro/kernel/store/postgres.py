"""The state in a PostgreSQL database, with one session that holds a lock: the agent's.

- Who holds the lock may write, and writes go through the same session. So a write that succeeds was made by the holder.
- A lost session is replaced. The lock comes first: as soon as it is ours, the lost session is over, and with it its
  last transaction. Every transaction that changes something leaves its number in one row, which then tells whether it
  was committed. Any other number there means that somebody else wrote, or that the database is an older one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ugro.kernel.agent.model import StoreStatus
from ugro.kernel.store.address import PostgresAddress
from ugro.kernel.store.connection import (
    Connection,
    ConnectionLost,
    Design,
    Opening,
    copy_rows,
    migrations,
    newest_schema,
    refuse_unless_empty,
    statements,
    tables,
    too_new,
)
from ugro.kernel.store.engine import SqliteConnection, connect_plainly, migrate
from ugro.kernel.store.examine import Examined
from ugro.kernel.store.postgres_connection import FUNCTIONS, PostgresConnection, connected, migration
from ugro.kernel.support.errors import NotAllowed, NotFound, StoreAway, UgroError

log = logging.getLogger(__name__)

_LOCK = int.from_bytes(b"ugrostor", "big") >> 1
_OLDEST_SERVER = 140000
_FIRST_WAIT_S = 5.0  # for the session of an agent that was killed a moment ago
_PAUSES_S = (0.05, 5.0)  # between two tries to connect: the first, and the longest
_SILENT_S = 10.0
_STATE = (
    "CREATE TABLE ugro_store "
    "(is_only BOOLEAN PRIMARY KEY CHECK (is_only), schema BIGINT NOT NULL, last TEXT NOT NULL, moved_to TEXT)"
)
_LOST = "has lost its tables, or what is in ugro_store"
_RESTORE = "restore the database; see: docs/stores.md"
_MOVED = "if that was interrupted, run it again: ugro store migrate --to sqlite; else use that one, or a new database"
_DEFAULTS = {
    "connect_timeout": "10",
    "target_session_attrs": "read-write",  # of several hosts, the one that takes writes
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
# The server notices a machine that is gone, and gives its lock free; nothing ends a session that is idle or slow.
_SETTINGS = (
    "tcp_keepalives_idle = 20", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 3", "statement_timeout = 0",
    "idle_session_timeout = 0", "idle_in_transaction_session_timeout = 0", "client_min_messages = warning",
)  # fmt: skip


class Postgres:
    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    look_every_s: float | None = 1.0

    def __init__(
        self,
        address: PostgresAddress,
        on_taken: Callable[[UgroError], None] = lambda error: None,
        *,
        patience_s: float = _FIRST_WAIT_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        """``on_taken``: called if another agent has the database, or it is not the same any more, after a reconnect.

        ``patience_s``: for a lock, at the start. ``silent_s``: a transaction that takes longer is reported.
        """
        self.address = address
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._design = Design()
        self._on_taken = on_taken
        self._connection: PostgresConnection | None = None
        self._session = 0  # the server's number of the session that has, or had, the lock
        self._last = ""  # the number that the last transaction left
        self._pending: str | None = None  # of a commit that was not answered
        self._given_up = threading.Event()
        self._away: str | None = None
        self._is_busy = False  # in the middle of a transaction

    @property
    def name(self) -> str:
        return self.address.url

    @property
    def problem(self) -> str | None:
        if self._away is not None:
            return self._away
        connection = self._connection
        if not self._is_busy or connection is None:
            return None
        silent_s = time.monotonic() - connection.heard_at
        return f"it has been silent for {silent_s:.0f} s" if silent_s > self._silent_s else None

    # --- the start ----------------------------------------------------------------------------------------------

    def examine(self, opening: Opening) -> Examined:
        opening.on_progress(f"opening {self.name}")
        connection: PostgresConnection | None = None
        try:
            connection = connect(self.address)
            self._lock_within(connection, self._patience_s)
            schema = self._read_schema(connection)
            if schema > newest_schema(self._design.migrations):
                raise too_new(self.name, schema)
        except (psycopg.Error, ConnectionLost, UgroError) as error:
            if connection is not None:
                connection.close()
            raise error if isinstance(error, UgroError) else self.unusable(error) from error
        self._take(connection)
        return Examined(schema)

    def migrate(self, db: Connection) -> None:
        found = db.execute("SELECT schema FROM ugro_store").fetchone()
        for function in FUNCTIONS:
            db.execute(function)
        for number, sql in sorted(migrations(self._design.migrations).items()):
            if number > found["schema"]:
                for statement in statements(sql):
                    db.execute(migration(statement))
                db.execute("UPDATE ugro_store SET schema = ?", (number,))

    def _read_schema(self, connection: PostgresConnection) -> int:
        """0: it is empty. Also reads the number of the last transaction."""
        tables = {str(name) for (name,) in connection.execute(_TABLES)}
        if "ugro_store" not in tables:
            if tables:
                what = f"{self.name} has tables of another program, such as {min(tables)}"
                raise UgroError(what, hint="make a database for UGRO alone: CREATE DATABASE ugro OWNER …")
            connection.say(f"{_STATE}; INSERT INTO ugro_store VALUES (TRUE, 0, '', NULL)")  # both or none
        row = connection.execute("SELECT schema, last, moved_to FROM ugro_store").fetchone()
        if row is None:
            raise UgroError(f"{self.name} {_LOST}", hint=_RESTORE)
        schema, self._last, moved = row
        if moved is not None:  # jobs would run twice
            raise NotAllowed(f"the state in {self.name} was moved to {moved}", hint=_MOVED)
        return int(schema)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """With the lock: no agent uses the database meanwhile."""
        self.examine(Opening())
        try:
            yield
        finally:
            self.close()

    # --- transactions -------------------------------------------------------------------------------------------

    def begin(self) -> PostgresConnection:
        connection = self._connection
        if connection is None:
            raise ConnectionLost("there is no connection")
        connection.heard_at = time.monotonic()
        self._is_busy = True
        connection.say("BEGIN")
        connection.has_written = False
        return connection

    def commit(self) -> None:
        connection = self._connection
        assert connection is not None
        if not connection.has_written:
            connection.say("COMMIT")
        else:
            self._pending = mark = uuid4().hex
            connection.say(f"UPDATE ugro_store SET last = '{mark}'; COMMIT")
            self._last, self._pending = mark, None
        self._is_busy = False

    def roll_back(self) -> None:
        self._is_busy, self._pending = False, None
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error, ConnectionLost):
                self._connection.say("ROLLBACK")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def makes_room(self, error: Exception) -> bool:
        return False  # its disk is its server's

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, ConnectionLost)

    def damage_in(self, error: Exception) -> str | None:
        """The server looks after its files."""
        return None

    def unusable(self, error: Exception) -> UgroError:
        words = " ".join(str(error).split()) or type(error).__name__
        return UgroError(f"{self.name} cannot be used: {words}", hint="try: psql with this URL; see: docs/stores.md")

    # --- a lost connection --------------------------------------------------------------------------------------

    def look(self) -> None:
        """Whatever is wrong: a new session is the way out."""
        if self._connection is None:
            raise ConnectionLost("there is no connection")
        poll = select.poll()
        try:
            poll.register(self._connection.raw.fileno(), select.POLLIN)
            if poll.poll(0):  # the end of the connection, or a notice
                self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            raise ConnectionLost(" ".join(str(error).split())) from error

    def give_up(self) -> None:
        self._given_up.set()

    def recover(self, lost: ConnectionLost) -> bool:
        if self._given_up.is_set():
            raise self._stopped()
        self._away = str(lost)
        log.error("%s does not answer: %s; the agent stands still until it does", self.name, lost)
        since = time.monotonic()
        before = self._connection
        self.close()
        connection, found = self._connect_again()
        connection.total_changes = before.total_changes if before is not None else 0
        pending, self._pending = self._pending, None
        if found not in (self._last, pending):
            connection.close()
            self._end("was used by another agent meanwhile, or is an older one", "start the agent again: it compares")
        self._last = found
        self._take(connection)
        self._away = None
        log.warning("%s answers again, after %.1f s", self.name, time.monotonic() - since)
        return found == pending

    def _connect_again(self) -> tuple[PostgresConnection, str]:
        """With the number that the last transaction left: the lock is ours, so nobody is at it any more."""
        pause_s, longest_s = _PAUSES_S
        while not self._given_up.wait(pause_s):
            pause_s = min(longest_s, 2 * pause_s)
            try:
                if (found := self._try_again()) is not None:
                    return found
            except (psycopg.Error, ConnectionLost, UgroError) as error:
                if isinstance(error, NotAllowed):  # another agent has it
                    raise
                self._away = " ".join(str(error).split())
        raise self._stopped()

    def _stopped(self) -> StoreAway:
        return StoreAway(f"{self.name} does not answer: {self._away}", hint="the agent stops")

    def _try_again(self) -> tuple[PostgresConnection, str] | None:
        connection = connect(self.address)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            if not self._lock(connection):
                return None
            try:
                row = connection.execute("SELECT last, moved_to FROM ugro_store").fetchone()
            except psycopg.errors.UndefinedTable:
                row = None
            if row is None:
                self._end(_LOST, _RESTORE)
            if row["moved_to"] is not None:
                self._end(f"is not in use any more: its state was moved to {row['moved_to']}", "use that one")
            stack.pop_all()
            return connection, str(row["last"])

    def _end(self, what: str, hint: str) -> NoReturn:
        error = NotAllowed(f"{self.name} {what}: this agent ends; jobs on the nodes keep running", hint=hint)
        self._given_up.set()
        self._on_taken(error)
        raise error

    # --- sessions and the lock ----------------------------------------------------------------------------------

    def _take(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self._session = connection.raw.info.backend_pid

    def _lock_within(self, connection: PostgresConnection, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not _try_lock(connection):
            if time.monotonic() > deadline:
                raise self._held(connection)
            time.sleep(0.05)

    def _lock(self, connection: PostgresConnection) -> bool:
        """False: our own lost session still has it, and is asked to end. Ends this agent if another agent has it."""
        if _try_lock(connection):
            return True
        holder = _holder(connection)
        if holder is not None and holder["pid"] != self._session:
            self._end(f"is used by {_who(holder)} now", "one agent at a time uses a database")
        if holder is not None:
            connection.execute("SELECT pg_terminate_backend(?)", (holder["pid"],))
        return False

    def _held(self, connection: PostgresConnection) -> UgroError:
        holder = _holder(connection)
        who = _who(holder) if holder is not None else "another agent"
        ended = f"; if that is gone: SELECT pg_terminate_backend({holder['pid']})" if holder is not None else ""
        return NotAllowed(f"{self.name} is used by {who}", hint=f"stop that one first: ugro agent stop{ended}")


def connect(address: PostgresAddress) -> PostgresConnection:
    """A session, without the lock."""
    given = conninfo_to_dict(address.url)
    more: dict[str, Any] = {key: value for key, value in _DEFAULTS.items() if key not in given}
    if (password := address.password()) is not None:
        more["password"] = password
    name = f"ugro agent {os.getpid()} on {socket.gethostname()}"
    raw = connected(address.url, application_name=name[:63], **more)
    try:
        _prepare(raw, address.url)
    except (psycopg.Error, UgroError):
        raw.close()
        raise
    return PostgresConnection(raw)


def _prepare(raw: psycopg.Connection[Any], name: str) -> None:
    if raw.info.server_version < _OLDEST_SERVER:
        version = raw.info.server_version // 10000
        raise UgroError(f"{name} is PostgreSQL {version}, which is too old", hint="14 or newer is needed")
    raw.execute("".join(f"SET {setting};" for setting in _SETTINGS).encode())
    query = "SELECT current_setting('server_encoding'), current_setting('synchronous_commit')"
    encoding, commits = raw.execute(query.encode()).fetchone() or ("", "")
    if encoding != "UTF8":
        raise UgroError(f"{name} is not in UTF-8", hint="CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0")
    if commits == "off":  # what is acknowledged must be on disk
        raw.execute(b"SET synchronous_commit = on")


_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
_HOLDER = (
    "SELECT l.pid, a.application_name AS name, a.client_addr AS address, a.backend_start AS since FROM pg_locks l "
    "LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND CAST(l.classid AS BIGINT) = ? AND CAST(l.objid AS BIGINT) = ? AND l.objsubid = 1"
)


def _try_lock(connection: PostgresConnection) -> bool:
    return bool(connection.execute("SELECT pg_try_advisory_lock(?)", (_LOCK,)).fetchone()[0])


def holder_of(connection: PostgresConnection) -> str | None:
    """Who has the lock."""
    holder = _holder(connection)
    return _who(holder) if holder is not None else None


def _holder(connection: PostgresConnection) -> Any:
    return connection.execute(_HOLDER, (_LOCK >> 32, _LOCK & 0xFFFFFFFF)).fetchone()


def _who(holder: Any) -> str:
    address = f" ({holder['address']})" if holder["address"] else ""
    since = f" since {holder['since']:%Y-%m-%d %H:%M:%S %Z}" if holder["since"] else ""
    return f"{holder['name'] or 'another session'}{address}{since}"


# --- copies of a state ------------------------------------------------------------------------------------------------
# Copies a state out of PostgreSQL into a SQLite file, and back.


_FACTS = "SELECT current_setting('server_version'), pg_database_size(current_database())"
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


def export(source: PostgresAddress, file: Path, is_wanted: Callable[[], bool] = lambda: True) -> dict[str, int]:
    """Into an empty file, as the state is at one moment; an agent may be using it. How many rows each table has."""
    with _errors_of(source), closing(connect(source)) as db:
        db.execute(_SNAPSHOT)
        schema = read_schema(db)
        if not schema:
            raise NotFound(f"there is no state in {source.url}", hint="the agent makes it: ugro agent start")
        with closing(_unsafe(file)) as copy:
            copy.execute("BEGIN")
            migrate(copy, Design().migrations, schema)
            counts = copy_rows(db, copy, schema, is_wanted)
            copy.execute("COMMIT")
    return counts


def load(source: Path, target: Postgres, *, replaces: bool = False) -> dict[str, int]:
    """From a file of the newest schema, in one transaction. ``target`` is held; ``replaces``: what is there goes."""
    newest = newest_schema(Design().migrations)
    with _errors_of(target.address):
        db = target.begin()
        target.migrate(db)
        if replaces:
            _empty(db, newest)
        refuse_unless_empty(db, newest, target.name)
        with closing(connect_plainly(source)) as file:
            counts = copy_rows(file, db, newest)
        _commit(target)
    return counts


def _commit(target: Postgres) -> None:
    try:
        target.commit()
    except ConnectionLost as lost:
        what = f"{target.name}: the connection was lost during the commit, so the copy may be there or not: {lost}"
        raise UgroError(what, hint="run it again; if the database is refused as not empty, name a new one") from lost


def read_schema(db: PostgresConnection) -> int:
    """0: there is no state."""
    try:
        row = db.execute("SELECT schema FROM ugro_store").fetchone()
    except psycopg.errors.UndefinedTable:
        return 0
    return int(row["schema"]) if row is not None else 0


def mark_moved(source: PostgresAddress, where: str) -> None:
    """From now on no agent starts with it, or goes on after a lost connection."""
    with _errors_of(source, "run it again: ugro store migrate --to sqlite"), closing(connect(source)) as db:
        db.execute("UPDATE ugro_store SET moved_to = ?", (where,))


def moved_to(source: PostgresAddress) -> str | None:
    with _errors_of(source), closing(connect(source)) as db:
        if not read_schema(db):
            return None
        where = db.execute("SELECT moved_to FROM ugro_store").fetchone()["moved_to"]
    return str(where) if where is not None else None


def look(address: PostgresAddress) -> StoreStatus:
    try:
        with closing(connect(address)) as db:
            schema = read_schema(db)
            version, size = db.execute(_FACTS).fetchone()
            return StoreStatus("postgresql", address.url, schema, int(size), str(version), holder_of(db))
    except (psycopg.Error, ConnectionLost, UgroError) as error:
        return StoreStatus("postgresql", address.url, 0, 0, problem=" ".join(str(error).split()))


def _empty(db: PostgresConnection, schema: int) -> None:
    """Ids begin again, too: what comes after an older state is recognized by them."""
    db.execute(f"TRUNCATE {', '.join(table.name for table in tables(schema))} RESTART IDENTITY")


def _unsafe(file: Path) -> SqliteConnection:
    """A copy is worth nothing until it is whole, so SQLite need not be careful with it."""
    db = connect_plainly(file)
    for pragma in ("journal_mode = MEMORY", "synchronous = OFF", "foreign_keys = ON"):
        db.execute(f"PRAGMA {pragma}")
    return db


@contextmanager
def _errors_of(address: PostgresAddress, hint: str = "nothing was changed; try: psql URL") -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, ConnectionLost) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise UgroError(f"{address.url} cannot be used: {words}", hint=hint) from error
