"""Copies a state out of PostgreSQL into a SQLite file, and into PostgreSQL from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg

from ugro.core.errors import NotFound, UgroError
from ugro.core.store import StoreStatus
from ugro.store.address import PostgresAddress
from ugro.store.backend import ConnectionLost, Design
from ugro.store.copying import copy_rows, refuse_unless_empty, tables
from ugro.store.migrations_folder import newest_schema
from ugro.store.postgres import Postgres, connect, holder_of
from ugro.store.postgres_connection import PostgresConnection
from ugro.store.sqlite_file import SqliteConnection, connect_plainly, migrate

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
