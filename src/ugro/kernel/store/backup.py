"""Copies of the state that are made while it is in use, each one file that was checked before it got its name.

A copy is a database like the state, with one more table: the files that belong to the identity of this agent. SQLite
copies a snapshot; a writer does not wait for it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import ugro
from ugro.kernel.agent.model import Backup
from ugro.kernel.agent.rules import BackupFile, to_remove
from ugro.kernel.store import examine as wal
from ugro.kernel.store.engine import Design, newest_schema
from ugro.kernel.store.examine import Thoroughness, check_content, damaged, examine, is_corruption, unusable
from ugro.kernel.support.errors import Damaged, UgroError

if TYPE_CHECKING:
    from ugro.kernel.store.address import PostgresAddress


_PAGES = 256  # copied at once
_SYNC_PAGES = 16 * _PAGES  # more unwritten data would hold up the syncs of other files
_PAUSE_S = 0.002  # between two steps: the disk is there for others, too
_PARTS = ".part"
_TABLES = (
    "CREATE TABLE backup (version TEXT NOT NULL, made_at TEXT NOT NULL)",
    "CREATE TABLE backup_files (name TEXT PRIMARY KEY, content BLOB NOT NULL)",
)
_TO_THE_END = Thoroughness("integrity_check")


@dataclass(frozen=True, slots=True)
class Content:
    backup: Backup
    files: Mapping[str, bytes]  # of the agent's identity, by name


def make(
    source: Path | PostgresAddress,
    target: Path,
    files: Iterable[Path] = (),
    is_wanted: Callable[[], bool] = lambda: True,
) -> Backup:
    """Raises ``Damaged`` if the state itself is; ``OSError`` or ``UgroError`` if the copy cannot be made.

    ``is_wanted`` is asked now and then; if not, the copy is given up.
    """
    part = target.with_name(target.name + _PARTS)
    try:
        part.unlink(missing_ok=True)
        # A file that somebody else has put there would be theirs to read, and the agent's key is in a backup.
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _copy_snapshot(source, part, is_wanted)
        _add(part, {file.name: file.read_bytes() for file in files if file.is_file()})
        check(part)
        sync(part)
        part.replace(target)
        sync(target.parent)
    except (sqlite3.DatabaseError, Damaged) as error:
        raise _failure(source, target, error) from error
    finally:
        for ending in ("", "-journal"):
            with suppress(OSError):
                wal.beside(part, ending).unlink()
    return look(target)


def schema_of(path: Path) -> int:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            return int(db.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error


def look(path: Path) -> Backup:
    """What is in a backup, or in a copy of ``state.db``; a bad one has a problem instead."""
    made_at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    nothing = (made_at, path.stat().st_size)
    try:
        return check(path).backup
    except (UgroError, OSError) as error:
        return Backup(str(path), *nothing, schema=0, version="", jobs=0, newest_job=None, problem=str(error))


def check(path: Path) -> Content:
    """Reads all of it; raises why it cannot be restored. Its log, if it has one, is not used."""
    design = Design()
    with path.open("rb") as file:
        if not file.read(1):
            raise damaged(path, "it is empty")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if missing := sorted(set(design.tables) - tables):
                raise Damaged(f"{path} is no backup of UGRO: it has no table {missing[0]!r}")
            check_content(path, db, _TO_THE_END)
            content = _content(path, db, has_more="backup" in tables)
    except sqlite3.DatabaseError as error:
        raise damaged(path, str(error)) from error
    if content.backup.schema > newest_schema(design.migrations):
        raise UgroError(f"{path} was made by a newer UGRO (schema {content.backup.schema})", hint="upgrade ugro")
    return content


def restore(source: Path, target: Path) -> Content:
    """Puts the state that is in a backup into a new file, checked and on disk. Returns what else is in the backup."""
    content = check(source)
    with closing(_connect(target)) as db:
        with closing(sqlite3.connect(f"{source.absolute().as_uri()}?immutable=1", uri=True)) as backup:
            backup.backup(db)
        for table in ("backup", "backup_files"):
            db.execute(f"DROP TABLE IF EXISTS {table}")
    examine(target, Design().tables, _TO_THE_END)
    sync(target)
    return content


def write_whole(path: Path, content: bytes) -> None:
    """There is never half of it, not even after a power cut."""
    part = path.with_name(path.name + _PARTS)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _copy_snapshot(source: Path | PostgresAddress, part: Path, is_wanted: Callable[[], bool]) -> None:
    if not isinstance(source, Path):
        from ugro.kernel.store.postgres import export  # PostgreSQL's client is loaded only where it is used

        export(source, part, is_wanted)
        return
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as state,
        closing(_connect(part)) as copy,
    ):
        state.execute("PRAGMA busy_timeout = 5000")
        # The snapshot is held from here on: otherwise each change would begin the copy again.
        state.execute("BEGIN")
        state.execute("SELECT count(*) FROM sqlite_master").fetchone()
        state.backup(copy, pages=_PAGES, progress=_pausing(part, is_wanted))
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it


def _pausing(part: Path, is_wanted: Callable[[], bool]) -> Callable[[int, int, int], None]:
    synced = 0

    def pause(status: int, remaining: int, total: int) -> None:
        nonlocal synced
        if not is_wanted():
            raise UgroError("the backup was given up: the agent stops")
        if total - remaining - synced >= _SYNC_PAGES:
            synced = total - remaining
            sync(part)
        time.sleep(_PAUSE_S)

    return pause


def _connect(path: Path) -> sqlite3.Connection:
    """A copy is worth nothing until it is whole, so SQLite need not be careful with it."""
    db = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF"):
        db.execute(f"PRAGMA {pragma}")
    return db


def _add(part: Path, files: Mapping[str, bytes]) -> None:
    with closing(_connect(part)) as db:
        for table in _TABLES:
            db.execute(table)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        db.execute("INSERT INTO backup VALUES (?, ?)", (ugro.__version__, now))
        db.executemany("INSERT INTO backup_files VALUES (?, ?)", files.items())


def _failure(
    source: Path | PostgresAddress, target: Path, error: sqlite3.DatabaseError | Damaged
) -> UgroError:
    """Either the state itself is damaged, or only what was written."""
    if not isinstance(source, Path):
        return UgroError(f"{source.url} cannot be copied to {target}: {error}", hint="is the disk full or failing?")
    if not isinstance(error, Damaged) and not is_corruption(error):
        return UgroError(f"{source} cannot be copied to {target}: {error}", hint="is the disk full?")
    try:
        with closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as db:
            check_content(source, db, _TO_THE_END)
    except Damaged as found:
        return found
    except sqlite3.DatabaseError as found:
        return unusable(source, found)
    return UgroError(f"the copy of {source} was damaged, and is removed", hint="is the disk failing?")


def _content(path: Path, db: sqlite3.Connection, *, has_more: bool) -> Content:
    jobs, newest = db.execute("SELECT count(*), max(id) FROM jobs").fetchone()
    schema = int(db.execute("PRAGMA user_version").fetchone()[0])
    version, made_at = "", datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    files: dict[str, bytes] = {}
    if has_more:
        version, made_at = db.execute("SELECT version, made_at FROM backup").fetchone()
        files = {str(name): bytes(content) for name, content in db.execute("SELECT name, content FROM backup_files")}
    return Content(Backup(str(path), made_at, path.stat().st_size, schema, version, jobs, newest), files)


# --- the folder of backups --------------------------------------------------------------------------------------------
# The agent makes these by itself. Their names say when; the newest good one is found, and the oldest go.


log = logging.getLogger(__name__)

_NAME = re.compile(r"state-(\d{6,})-(\d{8}T\d{6}Z)-schema(\d+)\.db")
_TIME = "%Y%m%dT%H%M%SZ"


class BackupFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> dict[BackupFile, Path]:
        """The newest first; other files in the folder are left alone."""
        found = dict(self._found())
        return {file: found[file] for file in sorted(found, key=lambda file: -file.number)}

    def all(self) -> list[Backup]:
        """Each is read to its end."""
        return [look(path) for path in self.files().values()]

    def newest_good(self) -> Backup | None:
        return next((found for found in map(look, self.files().values()) if found.problem is None), None)

    def next_path(self, schema: int, now: float) -> Path:
        number = max((file.number for file in self.files()), default=0) + 1
        return self.path / f"state-{number:06}-{datetime.fromtimestamp(now, UTC):{_TIME}}-schema{schema}.db"

    def tidy(self, now: float | None) -> None:
        """Removes what need not be kept, and what a killed agent left half-made."""
        files = self.files()
        for file in to_remove(files, now):
            files[file].unlink(missing_ok=True)
            log.info("removed the backup %s", files[file].name)
        for part in self.path.glob("*.part"):
            part.unlink(missing_ok=True)

    def _found(self) -> Iterator[tuple[BackupFile, Path]]:
        for path in self.path.glob("state-*.db"):
            if match := _NAME.fullmatch(path.name):
                made_at = datetime.strptime(match[2], _TIME).replace(tzinfo=UTC).timestamp()
                yield BackupFile(int(match[1]), made_at, path.stat().st_size, int(match[3])), path
