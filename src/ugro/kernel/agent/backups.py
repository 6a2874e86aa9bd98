"""Makes backups of the state while the agent runs, and refuses to start without the state that there was."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.kernel.agent.main import HomeLock
from ugro.kernel.agent.model import Backup, Restored
from ugro.kernel.agent.rules import has_room
from ugro.kernel.store import backup
from ugro.kernel.store.address import PostgresAddress, look_at, postgres_at, read_address
from ugro.kernel.store.backup import BackupFolder
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import Design, newest_schema
from ugro.kernel.store.examine import Examined, Thoroughness, examine
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import Damaged, NotAllowed, NotFound, UgroError
from ugro.kernel.support.quantities import count_of, in_words
from ugro.kernel.support.state_dir import StateDir

if TYPE_CHECKING:
    from ugro.kernel.store.postgres import Postgres


log = logging.getLogger(__name__)

_EVERY_S = 600.0
_FIRST_S = 60.0  # after the agent has started
_LOOK_S = 5.0
_PAUSES = 20  # a large state gets more time between two backups: so many times what one takes


class Backups:
    def __init__(self, home: StateDir, store: Store, may_remove: Callable[[], bool] = lambda: False) -> None:
        """``may_remove``: whether this machine's clock is to be believed."""
        self._home = home
        self._store = store
        self._source = read_address(home) or home.database
        self._folder = BackupFolder(home.backups)
        self._changes = -1  # of the store, when the last backup was made
        self._is_ending = False
        self._may_remove = may_remove
        self.every_s = _EVERY_S
        self.first_s = _FIRST_S
        self.last: Backup | None = None
        self.problem: str | None = None  # why the last one could not be made
        store.advise_with(lambda: advice(self._folder))

    def before_use(self, found: Examined) -> None:
        """Called before anything is written. Raises if the state is missing though there was one."""
        if found.schema == 0:
            refuse_if_missing(self._home, self._store.name)
        elif found.schema < newest_schema(Design().migrations):
            log.info("the state is about to be changed from schema %d, and is saved first", found.schema)
            self._make(found.schema)

    @property
    def is_due(self) -> bool:
        """Whether something has changed since the last one."""
        return self._store.changes != self._changes

    def end(self) -> None:
        """A backup that is being made is given up."""
        self._is_ending = True

    async def run(self) -> None:
        pause_s = max(self.first_s, self._until_next_s(time.time()))
        while self._store.damage is None:
            await asyncio.sleep(pause_s)
            pause_s = min(_LOOK_S, self.every_s)
            if self.is_due:
                changes, began = self._store.changes, time.monotonic()
                if await to_the_end(lambda: self._make(newest_schema(Design().migrations))):
                    self._changes = changes
                pause_s = max(self.every_s, _PAUSES * (time.monotonic() - began))

    def _until_next_s(self, now: float) -> float:
        """After a restart, too, they are not made more often."""
        ages_s = [now - file.made_at for file in self._folder.files()]
        return max((self.every_s - age_s for age_s in ages_s if age_s >= 0), default=0.0)

    def _make(self, schema: int) -> bool:
        """A failure is a warning: what runs is worth more than a copy of it."""
        try:
            self._check_room()
            target = self._folder.next_path(schema, time.time())
            self.last = backup.make(self._source, target, self._home.identity, lambda: not self._is_ending)
            self._folder.tidy(time.time() if self._may_remove() else None)
        except Damaged as error:
            self._store.refuse(error.message.partition(" is damaged: ")[2])
        except (UgroError, OSError) as error:
            if str(error) != self.problem:
                log.warning("no backup of the state could be made: %s", error)
            self.problem = str(error)
        else:
            self.problem = None
            log.info("backup %s: %s", Path(self.last.path).name, count_of(self.last.jobs, "job"))
        return self.problem is None

    def _check_room(self) -> None:
        self._folder.path.mkdir(mode=0o700, exist_ok=True)
        if not has_room(self._size_bytes(), backup.free_bytes(self._folder.path)):
            raise UgroError(f"the disk of {self._folder.path} is nearly full")


    def _size_bytes(self) -> int:
        if isinstance(self._source, Path):
            return self._source.stat().st_size
        return next((file.bytes for file in self._folder.files()), 0)


def refuse_if_missing(home: StateDir, name: str = "") -> None:
    folder = BackupFolder(home.backups)
    aside = [path for path in home.path.glob(f"{home.database.name}.before-restore-*") if path.name.endswith("Z")]
    found = (
        (len(folder.files()), "backup", "backups"),
        (_numbered(home.jobs), "folder of a job", "folders of jobs"),
        (len(aside), "earlier state", "earlier states"),
        (home.mark.exists(), "record of a state", ""),
    )
    facts = [f"{int(number)} {one if number == 1 else many}" for number, one, many in found if number]
    if facts:
        problem = f"{name or home.database} is missing or empty, but the folder has {in_words(facts)}"
        raise Damaged(problem, hint=advice(folder))


def advice(folder: BackupFolder) -> str:
    """What to do about a damaged state."""
    newest = folder.newest_good()
    empty = "begin with an empty state: ugro agent restore --empty"
    if newest is None:
        return f"there is no good backup in {folder.path}; restore another: ugro agent restore FILE; or {empty}"
    return f"restore {Path(newest.path).name}, the newest good backup: ugro agent restore --latest; or {empty}"


def _numbered(folder: Path) -> int:
    try:
        return sum(entry.name.isdecimal() for entry in folder.iterdir())
    except OSError:
        return 0


# --- without a running agent ------------------------------------------------------------------------------------------
# Clients start ``python -m ugro.kernel.agent.backups`` to make or restore a backup while no agent runs. It prints one
# JSON document. While it changes something it holds the agent's lock, so that no agent starts meanwhile.


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
    parser = argparse.ArgumentParser(prog="python -m ugro.kernel.agent.backups")
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
    from ugro.kernel.store.postgres import load

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
