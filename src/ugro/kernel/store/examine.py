"""Looks at a database before it is used: read only, so that a damaged one stays as it was found."""

from __future__ import annotations

import os
import pwd
import sqlite3
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ugro.kernel.support.errors import Damaged, UgroError

# --- SQLite's write-ahead log -----------------------------------------------------------------------------------------
# It is looked at from outside: SQLite itself silently skips a log, or the end of one, that is bad.
#
# The last acknowledged changes are in it. Whether some are missing follows from its index (``-shm``), which an agent
# that was killed leaves behind: SQLite counts a change there after it is on disk.


_MAGIC = (0x377F0682, 0x377F0683)
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_INDEX_BYTES = 100
_INDEX_VERSION = 3007000
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_MOST_FRAMES = 200_000  # that are looked at


@dataclass(frozen=True, slots=True)
class WalIndex:
    salts: bytes
    frames: int  # valid ones
    copied: int  # those of them that are in the database file


def index_bytes(database: Path) -> bytes:
    """To be read before SQLite opens the database, which empties it."""
    try:
        return beside(database, "-shm").read_bytes()
    except OSError:
        return b""


def put_back(database: Path, index: bytes) -> None:
    """What it proves is there for the next look, too. Nothing has the database open."""
    if index:
        beside(database, "-shm").write_bytes(index)


def parse_index(index: bytes) -> WalIndex | None:
    """None: it says nothing."""
    if len(index) < _INDEX_BYTES or index[:48] != index[48:96]:  # written in the middle of a change
        return None
    version, is_ready, frames = struct.unpack("=I8x?3xI", index[:20])
    if version != _INDEX_VERSION or not is_ready:
        return None
    return WalIndex(index[32:40], frames, struct.unpack("=I", index[96:100])[0])


def beside(database: Path, ending: str) -> Path:
    return database.with_name(database.name + ending)


def lost_changes(database: Path, before: WalIndex | None) -> str | None:
    """What is wrong with the log of a database that SQLite has just opened, or None.

    ``before``: the index that the last agent left.
    """
    now = parse_index(index_bytes(database))
    valid_frames = now.frames if now is not None else 0
    name = beside(database, "-wal").name
    try:
        with beside(database, "-wal").open("rb") as log:
            size, header = os.fstat(log.fileno()).st_size, log.read(_HEADER_BYTES)
            salts = _salts(header)
            if salts is None and header.strip(b"\0"):
                return f"{name} is not its log"
            if before is not None and salts in (None, before.salts) and _has_more(before, valid_frames):
                return f"{name} has lost its last changes"
            if salts is not None and _commits_after(log.fileno(), size, header, valid_frames) > 1:
                return f"{name} is damaged in the middle"
    except FileNotFoundError:
        if before is not None and _has_more(before, 0):
            return f"{name} is missing, and the last changes with it"
    return None


def _has_more(index: WalIndex, valid_frames: int) -> bool:
    return index.frames > index.copied and index.frames > valid_frames


def _salts(header: bytes) -> bytes | None:
    """None: this is no header of a log."""
    if len(header) < _HEADER_BYTES:
        return None
    magic, page_bytes = struct.unpack(">I4xI", header[:12])
    return header[16:24] if magic in _MAGIC and page_bytes in _PAGE_SIZES else None


def _commits_after(log: int, size: int, header: bytes, valid_frames: int) -> int:
    """Ends of transactions after the last valid frame.

    A power cut leaves one at most, because each is on disk before the next begins.
    """
    later = _frames(log, size, header, valid_frames)
    return sum(1 for salts, is_commit in later if is_commit and salts == header[16:24])


def _frames(log: int, size: int, header: bytes, first: int) -> Iterator[tuple[bytes, bool]]:
    step = _FRAME_HEADER_BYTES + struct.unpack(">I", header[8:12])[0]
    for at in range(_HEADER_BYTES + first * step, size - step + 1, step)[:_MOST_FRAMES]:
        frame = os.pread(log, _FRAME_HEADER_BYTES, at)
        yield frame[8:16], frame[4:8] != b"\0\0\0\0"


# --- the examination --------------------------------------------------------------------------------------------------


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
    index = index_bytes(path)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            schema = _examine(path, db, tables, parse_index(index))
            return Examined(schema, check_content(path, db, how, on_progress))
    except Damaged:
        put_back(path, index)
        raise
    except sqlite3.DatabaseError as error:
        put_back(path, index)
        raise unusable(path, error) from error


def _examine(path: Path, db: sqlite3.Connection, tables: Collection[str], index: WalIndex | None) -> int:
    schema = _schema(path, db, tables)
    if problem := lost_changes(path, index):
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
    for file in (path, beside(path, "-wal"), beside(path, "-shm")):
        if os.path.lexists(file) and (problem := _access(file)) is not None:
            raise UgroError(f"{path} cannot be used: {problem}", hint="run ugro as that user, or: chown")
    with path.open("rb") as opened:
        header = opened.read(len(SQLITE_HEADER))
    log = beside(path, "-wal")
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
