"""A connection to PostgreSQL that the store uses as it uses one to SQLite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import psycopg

from ugro.store.backend import ConnectionLost
from ugro.store.connection import Cursor, Values
from ugro.store.dialect import storable, stored, translated

_READ_ONLY = "25006"  # it was a primary, and is a standby now


class _Row(tuple[Any, ...]):
    """Subclasses have the places of their columns."""

    __slots__ = ()
    places: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.places[key] if isinstance(key, str) else key)


@lru_cache(maxsize=512)
def _row_class(names: tuple[str, ...]) -> type[_Row]:
    return type("Row", (_Row,), {"__slots__": (), "places": {name: place for place, name in enumerate(names)}})


def _rows(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], _Row]:
    kind = _row_class(tuple(column.name for column in cursor.description or ()))
    return lambda values: kind(stored(value) if isinstance(value, str) else value for value in values)


class _Cursor(psycopg.RawCursor[Any]):
    """Placeholders are numbered, as ``translated`` writes them."""


class PostgresConnection:
    """Raises ConnectionLost if the session is over, or takes no writes any more."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        raw.cursor_factory = _Cursor
        raw.row_factory = _rows
        self.raw = raw
        self.total_changes = 0
        self.has_written = False  # since the transaction began
        self.heard_at = time.monotonic()  # the server's last answer

    def close(self) -> None:
        self.raw.close()

    @property
    def is_lost(self) -> bool:
        return self.raw.closed or self.raw.broken

    def say(self, text: str) -> None:
        """Statements without values, which are not worth remembering."""
        try:
            self.raw.execute(text.encode(), prepare=False)
        except psycopg.Error as error:
            self._raise_if_lost(error)
            raise
        self.heard_at = time.monotonic()

    def execute(self, sql: str, parameters: Values = (), /) -> Cursor:
        statement = translated(sql)
        try:
            cursor = self.raw.execute(statement.text.encode(), [_value(one) for one in parameters] or None)
        except psycopg.Error as error:
            self._raise_if_lost(error)
            raise
        self.heard_at = time.monotonic()
        if statement.is_write:
            self._wrote(cursor)
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor:
        cursor = self.raw.cursor()
        try:
            cursor.executemany(translated(sql).text.encode(), [[_value(one) for one in row] for row in parameters])
        except psycopg.Error as error:
            self._raise_if_lost(error)
            raise
        self._wrote(cursor)
        return cursor

    def newest_id(self, table: str, column: str = "id") -> int:
        last, is_called = self.execute(f"SELECT last_value, is_called FROM {_sequence(table, column)}").fetchone()
        return int(last) if is_called else 0

    def raise_ids(self, table: str, to: int, column: str = "id") -> None:
        """At once, and not undone with the transaction: ids are only skipped."""
        if to > self.newest_id(table, column):
            self.execute("SELECT setval(?, ?)", (_sequence(table, column), to))

    def _raise_if_lost(self, error: psycopg.Error) -> None:
        if self.is_lost or error.sqlstate == _READ_ONLY:
            raise ConnectionLost(" ".join(str(error).split()) or "the connection was lost") from error

    def _wrote(self, cursor: psycopg.Cursor[Any]) -> None:
        self.has_written = True
        self.total_changes += max(0, cursor.rowcount)


def _sequence(table: str, column: str) -> str:
    """As PostgreSQL names that of an identity column."""
    return f"{table}_{column}_seq"


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    return int(value) if isinstance(value, bool) else value
