"""The folder of backups that the agent makes by itself: their names, the newest good one, and which of them go."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ugro.core.backup import Backup
from ugro.policy.lifecycle.backups import BackupFile, to_remove
from ugro.store.backup import look

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
