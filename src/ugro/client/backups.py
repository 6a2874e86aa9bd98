"""Backups of the agent's state: ``client.backups``. They need no running agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugro.core.backup import Backup, Restored
from ugro.core.errors import Interrupted, UgroError, error_from_wire
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import StateDir

_SHOW_AFTER_S = 0.3


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
        """In a process of its own: only the agent's program knows its state."""
        # -P: modules of the current folder, such as a json.py, are not ours.
        argv = [sys.executable, "-P", "-m", "ugro.agent.recovery", "--home", str(self._home.path), what, "--", *words]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            answer, errors = self._wait(process, doing)
        except KeyboardInterrupt:
            process.terminate()
            process.communicate()  # what it has begun to replace, it replaces
            raise Interrupted(f"interrupted: {doing}", hint="see what there is: ugro agent restore --list") from None
        try:
            found = json.loads(answer)
        except ValueError as error:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise UgroError(f"{doing} failed: {''.join(last) or 'it was killed'}") from error
        if "error" in found:
            raise error_from_wire(found["error"])
        return found

    def _wait(self, process: subprocess.Popen[bytes], doing: str) -> tuple[bytes, bytes]:
        since = time.monotonic()
        while True:
            try:
                return process.communicate(timeout=_SHOW_AFTER_S)
            except subprocess.TimeoutExpired:
                if self._on_wait:
                    self._on_wait(f"{doing}, {time.monotonic() - since:.0f} s")
