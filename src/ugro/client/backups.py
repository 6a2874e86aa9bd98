"""Backups of the agent's state: ``client.backups``. They need no running agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugro.client.own_program import Program
from ugro.core.backup import Backup, Restored
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import StateDir


class Backups:
    def __init__(self, home: StateDir, on_wait: Callable[[str], None] | None = None) -> None:
        self._home = home
        self._on_wait = on_wait

    def all(self) -> list[Backup]:
        """Those that the agent keeps, the newest first. Each is read and checked."""
        return [decode(Backup, one) for one in self._run("reading the backups", "list")["backups"]]

    def make(self, file: Path | str | None = None) -> Backup:
        """Into a new file, or among those that the agent keeps and removes by itself."""
        words = [os.path.abspath(file)] if file is not None else []
        return decode(Backup, self._run("backing up the state", "backup", *words)["backup"])

    def find(self, which: Path | str | None = None) -> Backup:
        """What ``restore`` would restore; raises why it could not. Changes nothing."""
        return decode(Backup, self._run("reading the backup", "find", *self._words(which))["backup"])

    def restore(self, which: Path | str | None = None) -> Restored:
        """A file, or the name of a backup; the newest good one by default. Refused while an agent runs.

        The present state is set aside, not deleted.
        """
        return decode(Restored, self._run("restoring the state", "restore", *self._words(which))["restored"])

    def begin_empty(self) -> Restored:
        """Sets the present state aside and begins with an empty one. Refused while an agent runs."""
        return decode(Restored, self._run("restoring the state", "empty")["restored"])

    def _words(self, which: Path | str | None) -> list[str]:
        return [os.fspath(which)] if which is not None else []

    def _run(self, doing: str, what: str, *words: str) -> Any:
        asked = Program("ugro.agent.recovery", self._home, self._on_wait)
        return asked.run(doing, "see what there is: ugro agent restore --list", what, "--", *words)
