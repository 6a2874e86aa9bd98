"""Copies all rows of a state from one database to another, and compares them afterwards.

Both have the same schema. Rows are read in pages, in the order of their keys, so a large table needs little memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import zip_longest
from typing import Any

from ugro.core.errors import NotAllowed, UgroError
from ugro.store.backend import Design
from ugro.store.connection import Connection
from ugro.store.migrations_folder import migrations, statements

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
