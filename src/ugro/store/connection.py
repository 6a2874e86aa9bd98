"""What the store asks of a database: SQL that SQLite and PostgreSQL both understand, with ``?`` for each value.

``sqlite3`` connections fit as they are; ``postgres_connection`` adapts those of PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

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
