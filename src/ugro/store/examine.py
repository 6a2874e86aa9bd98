"""Looks at a database before it is used: read only, so that a damaged one stays as it was found."""

from __future__ import annotations

import os
import pwd
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ugro.core.errors import Damaged, UgroError
from ugro.store import wal

SQLITE_HEADER = b"SQLite format 3\0"
_STEPS = 20_000  # of SQLite's virtual machine between two looks at the clock
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_IDENTITY = "meta"  # the table that says whose state it is
_NO_PROGRESS: Callable[[str], None] = lambda text: None  # noqa: E731


@dataclass(frozen=True, slots=True)
class Thoroughness:
    """How to look. ``integrity_check`` compares indexes with their tables, too; ``quick_check`` takes half the time."""

    check: str = "integrity_check"
    limit_s: float | None = None
    shown_every_s: float = 0.5  # progress


@dataclass(frozen=True, slots=True)
class Examined:
    schema: int  # 0: there is nothing in it, or no file
    is_checked: bool = True  # False: the time was up before the end


def examine(
    path: Path,
    tables: Collection[str],
    how: Thoroughness,
    on_progress: Callable[[str], None] = _NO_PROGRESS,
) -> Examined:
    """Raises ``Damaged`` if the database cannot be trusted. ``tables``: some that it must have unless it is empty."""
    if not os.path.lexists(path):
        return Examined(0)
    _check_file(path)
    index = wal.index_bytes(path)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            schema = _examine(path, db, tables, wal.parse_index(index))
            return Examined(schema, check_content(path, db, how, on_progress))
    except Damaged:
        wal.put_back(path, index)
        raise
    except sqlite3.DatabaseError as error:
        wal.put_back(path, index)
        raise unusable(path, error) from error


def _examine(path: Path, db: sqlite3.Connection, tables: Collection[str], index: wal.WalIndex | None) -> int:
    schema = _schema(path, db, tables)
    if problem := wal.lost_changes(path, index):
        raise damaged(path, problem, f"go on with what {path.name} holds: ugro agent restore {path}")
    if schema and _IDENTITY in tables:
        _check_identity(path, db)
    return schema


def check_content(
    path: Path, db: sqlite3.Connection, how: Thoroughness, on_progress: Callable[[str], None] = _NO_PROGRESS
) -> bool:
    """False: the time was up before the end."""
    clock = _Clock(path, how, on_progress)
    db.set_progress_handler(clock.tick, _STEPS)
    try:
        [first, *_] = db.execute(f"PRAGMA {how.check}(1)").fetchone()
        orphan = db.execute("PRAGMA foreign_key_check").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return False
    finally:
        db.set_progress_handler(None, 0)
    if first != "ok":
        raise damaged(path, " ".join(str(first).split()).removeprefix("*** in database main *** "))
    if orphan is not None:
        raise damaged(path, f"row {orphan[1]} of {orphan[0]} refers to a row of {orphan[2]} that does not exist")
    return True


def damaged(path: Path | str, what: str, hint: str | None = None) -> Damaged:
    return Damaged(f"{path} is damaged: {what}", hint=hint)


def is_corruption(error: BaseException) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _CORRUPT


def unusable(path: Path, error: sqlite3.Error) -> UgroError:
    if is_corruption(error):
        return damaged(path, str(error))
    return UgroError(
        f"{path} cannot be used: {error}",
        hint="is the disk full, or is the file not readable? Acknowledged changes are not lost",
    )


class _Clock:
    def __init__(self, path: Path, how: Thoroughness, on_progress: Callable[[str], None]) -> None:
        self._text = f"checking {path.name} ({path.stat().st_size / 1e6:.0f} MB)"
        self._how = how
        self._on_progress = on_progress
        self._since = time.monotonic()
        self._shown_at = self._since

    def tick(self) -> int:
        """SQLite stops if this is not zero."""
        now = time.monotonic()
        if now - self._shown_at > self._how.shown_every_s:
            self._shown_at = now
            self._on_progress(f"{self._text}, {now - self._since:.0f} s")
        return int(self._how.limit_s is not None and now - self._since > self._how.limit_s)


def _check_file(path: Path) -> None:
    """Whether this is a file of ours, before SQLite is asked."""
    if not path.is_file():
        raise damaged(path, "it is not a file")
    for file in (path, wal.beside(path, "-wal"), wal.beside(path, "-shm")):
        if os.path.lexists(file) and (problem := _access(file)) is not None:
            raise UgroError(f"{path} cannot be used: {problem}", hint="run ugro as that user, or: chown")
    with path.open("rb") as opened:
        header = opened.read(len(SQLITE_HEADER))
    log = wal.beside(path, "-wal")
    if not header and log.exists() and log.stat().st_size:  # SQLite would delete the log
        raise damaged(path, f"it is empty, and {log.name} is not")
    if header and header != SQLITE_HEADER:
        raise damaged(path, "it is not a SQLite database")


def _access(file: Path) -> str | None:
    owner = file.stat().st_uid
    if owner != os.geteuid():
        return f"{file.name} belongs to {_user(owner)}, and this is {_user(os.geteuid())}"
    return None if os.access(file, os.R_OK | os.W_OK) else f"{file.name} must be readable and writable"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _schema(path: Path, db: sqlite3.Connection, tables: Collection[str]) -> int:
    schema = int(db.execute("PRAGMA user_version").fetchone()[0])
    found = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not found and schema == 0:
        return 0
    if missing := sorted(set(tables) - found):
        raise damaged(path, f"it has no table {missing[0]!r}: is it the file of another program?")
    return schema


def _check_identity(path: Path, db: sqlite3.Connection) -> None:
    """SQLite would mix the log of another database into this one."""
    query = f"SELECT value FROM {_IDENTITY} WHERE key = 'agent_id'"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as alone:
            ours = alone.execute(query).fetchone()
    except sqlite3.DatabaseError:  # without its log it need not be whole
        return
    both = db.execute(query).fetchone()
    if ours is not None and both != ours:
        raise damaged(path, f"{path.name}-wal is the log of another database")
