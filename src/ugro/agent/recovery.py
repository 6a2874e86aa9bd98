"""Backs up and restores the state without a running agent: ``python -m ugro.agent.recovery``, which clients start.

It prints one JSON document. While it changes something it holds the agent's lock, so that no agent starts meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.agent.lock import HomeLock
from ugro.agent.ops.backups import advice
from ugro.core.backup import Backup, Restored
from ugro.core.errors import Damaged, NotAllowed, NotFound, UgroError
from ugro.core.support.codec import dumps
from ugro.core.support.state_dir import StateDir
from ugro.store import backup
from ugro.store.address import PostgresAddress, read_address
from ugro.store.backup_folder import BackupFolder
from ugro.store.database import Store
from ugro.store.engine import Design
from ugro.store.examine import Thoroughness, examine
from ugro.store.locate import look_at, postgres_at

if TYPE_CHECKING:
    from ugro.store.postgres import Postgres


def main() -> None:
    arguments = _arguments()
    os.umask(0o077)
    home = StateDir(Path(arguments.home).absolute())
    try:
        answer = _do(home, arguments)
    except UgroError as error:
        answer = {"error": error.to_wire()}
    except OSError as error:
        answer = {"error": home.unusable(error).to_wire()}
    sys.stdout.write(dumps(answer))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ugro.agent.recovery")
    parser.add_argument("--home", required=True)
    parser.add_argument("what", choices=["list", "backup", "find", "restore", "empty"])
    parser.add_argument("file", nargs="?")
    return parser.parse_args()


def _do(home: StateDir, arguments: argparse.Namespace) -> dict[str, Any]:
    folder = BackupFolder(home.backups)
    match arguments.what:
        case "list":
            return {"backups": folder.all()}
        case "backup":
            return {"backup": make_backup(home, Path(arguments.file).absolute() if arguments.file else None)}
        case "find":
            return {"backup": _checked(_chosen(folder, arguments.file)).backup}
        case "restore":
            return {"restored": restore(home, _chosen(folder, arguments.file))}
    return {"restored": restore(home, None)}


def make_backup(home: StateDir, target: Path | None) -> Backup:
    """Whether an agent runs or not: databases let others read while it writes."""
    source = read_address(home) or home.database
    if source == home.database and not home.database.exists():
        raise NotFound(f"there is no state in {home.path}", hint="the agent makes it: ugro agent start")
    if target is not None and target.exists():
        raise NotAllowed(f"{target} exists", hint="name a new file")
    if target is not None and not target.parent.is_dir():
        raise NotFound(f"there is no folder {target.parent}", hint="make it first")
    try:
        if source == home.database and HomeLock.take(home) is not None:  # nobody has looked at it yet
            examine(home.database, Design().tables, Thoroughness())
        if target is None:
            home.backups.mkdir(mode=0o700, exist_ok=True)
            target = BackupFolder(home.backups).next_path(_schema_of(source), time.time())
        return backup.make(source, target, home.identity)
    except Damaged as error:
        error.hint = error.hint or advice(BackupFolder(home.backups))
        raise
    except OSError as error:
        raise UgroError(f"{target} cannot be written: {_words(error)}", hint="name another file") from error


def restore(home: StateDir, source: Path | None) -> Restored:
    """``source``: None for an empty state. What is there is set aside, and never deleted."""
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if HomeLock.take(home) is None:
        raise NotAllowed(
            f"an agent runs in {home.path}", hint="stop it first: ugro agent stop; jobs on the nodes keep running"
        )
    address = read_address(home)
    if address is None:
        return _restore(home, source, None)
    database = postgres_at(address)
    with database.held():  # no agent on another machine uses it
        return _restore(home, source, database)


def _restore(home: StateDir, source: Path | None, database: Postgres | None) -> Restored:
    fresh = home.database.with_name("state.db.restoring")
    _remove(fresh)
    try:
        content = _put(source, fresh) if source is not None else None
        if content is None or database is not None:
            asyncio.run(_make_newest(fresh))
        for number in (signal.SIGINT, signal.SIGTERM):  # from here on it is done as a whole
            signal.signal(number, signal.SIG_IGN)
        ending = f".before-restore-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        aside = _set_aside(home.database, ending) if database is None else _export_aside(home, database, ending)
        for name, there in _identity(home, content).items():
            aside += _set_aside(home.path / name, ending)
            backup.write_whole(home.path / name, there)
        # Last: without a state no agent starts, and with it no agent lacks its key.
        if database is None:
            fresh.replace(home.database)
        else:
            _load(fresh, database)
        backup.sync(home.path)
    finally:
        _remove(fresh)
    return Restored(content.backup if content else None, tuple(str(path) for path in aside))


def _schema_of(source: Path | PostgresAddress) -> int:
    if isinstance(source, Path):
        return backup.schema_of(source)
    found = look_at(source)
    if found.problem is not None:
        raise UgroError(f"{source.url} cannot be used: {found.problem}", hint="is the server running?")
    return found.schema


def _export_aside(home: StateDir, database: Postgres, ending: str) -> list[Path]:
    if not _schema_of(database.address):
        return []
    aside = home.database.with_name(home.database.name + ending)
    backup.make(database.address, aside, home.identity)
    return [aside]


def _load(fresh: Path, database: Postgres) -> None:
    from ugro.store.postgres_copy import load

    load(fresh, database, replaces=True)


def _checked(source: Path) -> backup.Content:
    try:
        return _hinted(lambda: backup.check(source))
    except OSError as error:
        raise UgroError(f"{source} cannot be read: {_words(error)}", hint="name another file") from error


def _put(source: Path, fresh: Path) -> backup.Content:
    try:
        return _hinted(lambda: backup.restore(source, fresh))
    except (OSError, sqlite3.Error) as error:
        hint = "is the disk full, or the file not readable? The present state is as it was"
        raise UgroError(f"{source} cannot be restored to {fresh.parent}: {_words(error)}", hint=hint) from error


def _hinted(read: Callable[[], backup.Content]) -> backup.Content:
    try:
        return read()
    except Damaged as error:
        error.hint = error.hint or "see which backups are good: ugro agent restore --list"
        raise


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()


def _identity(home: StateDir, content: backup.Content | None) -> dict[str, bytes]:
    """What differs from the files that are there. Only known names: a backup may come from anybody."""
    known = {path.name for path in home.identity}
    found = {name: there for name, there in (content.files if content else {}).items() if name in known}
    return {name: there for name, there in found.items() if _read(home.path / name) != there}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _set_aside(path: Path, ending: str) -> list[Path]:
    """A database with its log. The file itself first: a state without its log would be an older one."""
    aside = path.with_name(path.name + ending)
    moved = []
    for more in ("", "-wal", "-shm"):
        old, new = path.with_name(path.name + more), aside.with_name(aside.name + more)
        if os.path.lexists(old):
            old.rename(new)
            moved.append(new)
    return moved


async def _make_newest(fresh: Path) -> None:
    """Empty if there is no such file; else what is there, in the newest schema."""
    store = Store(fresh)
    await store.open()
    await store.close()


def _chosen(folder: BackupFolder, word: str | None) -> Path:
    """A path, or the name of a backup as it is listed; None: the newest good one."""
    if word is None:
        if (newest := folder.newest_good()) is None:
            raise NotFound(f"there is no good backup in {folder.path}", hint="see: ugro agent restore --list")
        return Path(newest.path)
    for path in (Path(word).absolute(), folder.path / word):
        if path.is_file():
            return path
    what = f"{word} is a folder, and a backup is a file" if Path(word).is_dir() else f"there is no backup {word}"
    raise NotFound(what, hint="see: ugro agent restore --list")


def _remove(fresh: Path) -> None:
    for more in ("", "-wal", "-shm", "-journal"):
        fresh.with_name(fresh.name + more).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
