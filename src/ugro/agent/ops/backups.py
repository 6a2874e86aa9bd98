"""Makes backups of the state while the agent runs, and refuses to start without the state that there was."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from ugro.agent.support.aio import to_the_end
from ugro.core.backup import Backup
from ugro.core.errors import Damaged, UgroError
from ugro.core.support.state_dir import StateDir
from ugro.policy.lifecycle.backups import has_room
from ugro.policy.wording import count_of, in_words
from ugro.store import backup
from ugro.store.address import read_address
from ugro.store.backup_folder import BackupFolder
from ugro.store.database import Store
from ugro.store.engine import Design, newest_schema
from ugro.store.examine import Examined

log = logging.getLogger(__name__)

_EVERY_S = 600.0
_FIRST_S = 60.0  # after the agent has started
_LOOK_S = 5.0
_PAUSES = 20  # a large state gets more time between two backups: so many times what one takes


class Backups:
    def __init__(self, home: StateDir, store: Store) -> None:
        self._home = home
        self._store = store
        self._source = read_address(home) or home.database
        self._folder = BackupFolder(home.backups)
        self._changes = -1  # of the store, when the last backup was made
        self._is_ending = False
        self.may_remove: Callable[[], bool] = lambda: False  # whether this machine's clock is to be believed
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
            self._folder.tidy(time.time() if self.may_remove() else None)
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
