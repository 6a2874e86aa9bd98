"""What the store asks of a database: SQL that SQLite and PostgreSQL both understand, with ``?`` for each value.

``sqlite3`` connections fit as they are; ``postgres_connection`` adapts those of PostgreSQL.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import resources
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from ugro.kernel.store.examine import Examined, Thoroughness
from ugro.kernel.support.errors import NotAllowed, UgroError

T = TypeVar("T")

Values = Sequence[Any] | Mapping[str, Any]  # by name in files of SQLite only, which metrics are
NO_LIMIT = 2**63 - 1  # an OFFSET needs a LIMIT before it


class Row(Protocol):
    """By the column's name or number, and in order."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Cursor(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def rowcount(self) -> int: ...


class Connection(Protocol):
    def execute(self, sql: str, parameters: Values = ..., /) -> Cursor: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor: ...

    @property
    def total_changes(self) -> int:
        """Rows that were changed since it was opened."""

    def newest_id(self, table: str, column: str = ...) -> int:
        """The highest that this table ever gave for ``column`` (``id``); 0 if there was none."""

    def raise_ids(self, table: str, to: int, column: str = ...) -> None:
        """The next id is above ``to``, unless it is anyway."""


Work = Callable[[Connection], T]


# --- backends ---------------------------------------------------------------------------------------------------------
# The rows are in a SQLite file or a PostgreSQL database; this is what the database's thread asks of either.


# Clients wait twice as long for the agent. What such a check does not reach is checked in the first backup.
THOROUGH = Thoroughness("integrity_check", limit_s=15.0)


@dataclass(frozen=True, slots=True)
class Design:
    """What a database is to look like."""

    migrations: str = "ugro.kernel.store"  # the package whose folder of that name has the steps
    tables: tuple[str, ...] = ("meta", "jobs", "attempts", "events")  # some of those that it must have
    # How to look at it before it is used; None: somebody else has done so.
    how: Thoroughness | None = THOROUGH


@dataclass(frozen=True, slots=True)
class Opening:
    """What is called while a database is opened."""

    on_progress: Callable[[str], None] = lambda text: None
    # With what was found, before anything is written; may raise.
    on_examined: Callable[[Examined], None] = lambda found: None


class ConnectionLost(Exception):
    """In the middle of a transaction, or of its commit."""


class Backend(Protocol):
    """Used by one thread at a time; ``problem`` and ``give_up`` by any."""

    @property
    def name(self) -> str:
        """How errors call it; without a password."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its connections raise."""

    @property
    def problem(self) -> str | None:
        """Why nothing can be read or written now, though later it may."""

    def examine(self, opening: Opening) -> Examined | None:
        """Before anything is written; raises if it cannot be used. None: nobody was to look."""

    def migrate(self, db: Connection) -> None: ...

    def begin(self) -> Connection: ...

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...

    def close(self) -> None: ...

    @property
    def look_every_s(self) -> float | None:
        """How often ``look`` is called while nobody asks for anything; None: never."""

    def look(self) -> None:
        """Raises ConnectionLost if nothing could be read or written now."""

    def recover(self, lost: ConnectionLost) -> bool:
        """Returns when there is a connection again; True if what was lost had been committed."""

    def give_up(self) -> None:
        """Nobody waits for a lost connection any longer."""

    def makes_room(self, error: Exception) -> bool:
        """Whether nothing of the commit was written for want of space, of which there is more now."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether what the others of the same commit wrote goes with it."""

    def damage_in(self, error: Exception) -> str | None:
        """What is damaged, if the error says so."""

    def unusable(self, error: Exception) -> UgroError:
        """One of ``errors``, for a person."""


def too_new(name: str, schema: int) -> UgroError:
    return UgroError(f"{name} was written by a newer UGRO (schema {schema})", hint="upgrade ugro on this machine")


# --- migrations -------------------------------------------------------------------------------------------------------
# The numbered steps to the newest schema lie in a package.


def migrations(package: str) -> dict[int, str]:
    folder = resources.files(package) / "migrations"
    found = {}
    for entry in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name):
            found[int(match[1])] = entry.read_text()
    return found


def newest_schema(package: str) -> int:
    return max(migrations(package))


def statements(sql: str) -> list[str]:
    """In our migrations a semicolon only ends a statement. ``executescript`` would commit on its own."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]


# --- copying a state --------------------------------------------------------------------------------------------------
# Copies all rows from one database to another, and compares them afterwards. Both have the same schema. Rows are read
# in pages, in the order of their keys, so a large table needs little memory.


_PAGE = 1000  # rows


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]  # columns
    counter: str | None = None  # the column that the database numbers


def tables(schema: int) -> list[Table]:
    """Of that schema; a table comes after those that it refers to."""
    with closing(sqlite3.connect(":memory:")) as db:
        for number, sql in sorted(migrations(Design().migrations).items()):
            if number <= schema:
                for statement in statements(sql):
                    db.execute(statement)
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        found = {name: _table(db, name, sql) for name, sql in db.execute(query).fetchall()}
        parents = {name: {row[2] for row in db.execute(f"PRAGMA foreign_key_list({name})")} - {name} for name in found}
    return [found[name] for name in TopologicalSorter(parents).static_order()]


def refuse_unless_empty(db: Connection, schema: int, name: str) -> None:
    for table in tables(schema):
        if db.execute(f"SELECT 1 FROM {table.name} LIMIT 1").fetchone() is not None:
            raise NotAllowed(f"{name} is not empty: there are rows in {table.name}", hint="name a new database")


def count_rows(db: Connection, schema: int) -> dict[str, int]:
    return {table.name: int(db.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()[0]) for table in tables(schema)}


def copy_rows(
    source: Connection, target: Connection, schema: int, is_wanted: Callable[[], bool] = lambda: True
) -> dict[str, int]:
    """How many rows each table has. Raises if what was written differs from what was read."""
    counts = {}
    for table in tables(schema):
        counts[table.name] = 0
        marks = ",".join("?" * len(table.columns))
        insert = f"INSERT INTO {table.name} ({_list(table.columns)}) VALUES ({marks})"
        for page in _pages(source, table):
            if not is_wanted():
                raise UgroError("the copy was given up: the agent stops")
            target.executemany(insert, page)
            counts[table.name] += len(page)
        if table.counter is not None:
            target.raise_ids(table.name, source.newest_id(table.name, table.counter), table.counter)
    _compare(source, target, schema)
    return counts


def _compare(source: Connection, target: Connection, schema: int) -> None:
    for table in tables(schema):
        for ours, theirs in zip_longest(_rows(source, table), _rows(target, table)):
            if ours != theirs:
                key = dict(zip(table.columns, ours or theirs or (), strict=False))
                which = ", ".join(f"{name} {key[name]!r:.40}" for name in table.key)
                raise UgroError(f"a row of {table.name} differs in the copy ({which}); nothing was changed")


def _rows(db: Connection, table: Table) -> Iterator[tuple[Any, ...]]:
    for page in _pages(db, table):
        yield from page


def _pages(db: Connection, table: Table) -> Iterator[Sequence[tuple[Any, ...]]]:
    key = _list(table.key)
    places = [table.columns.index(name) for name in table.key]
    query = f"SELECT {_list(table.columns)} FROM {table.name}"
    order = f"ORDER BY {key} LIMIT {_PAGE}"
    page = [tuple(row) for row in db.execute(f"{query} {order}").fetchall()]
    while page:
        yield page
        last = [page[-1][place] for place in places]
        after = f"{query} WHERE ({key}) > ({','.join('?' * len(last))}) {order}"
        page = [tuple(row) for row in db.execute(after, last).fetchall()] if len(page) == _PAGE else []


def _table(db: sqlite3.Connection, name: str, sql: str) -> Table:
    columns = db.execute(f"PRAGMA table_info({name})").fetchall()
    key = tuple(str(row[1]) for row in sorted(columns, key=lambda row: int(row[5])) if row[5])
    return Table(name, tuple(str(row[1]) for row in columns), key, key[0] if "AUTOINCREMENT" in sql else None)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
