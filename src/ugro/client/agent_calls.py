"""Programs of the agent that need no running agent: only they know its state, so they run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ugro.kernel.agent.model import Backup, Moved, Restored, StoreStatus
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import Interrupted, UgroError, error_from_wire
from ugro.kernel.support.state_dir import StateDir

_SHOW_AFTER_S = 0.3


class Program:
    def __init__(self, module: str, home: StateDir, on_wait: Callable[[str], None] | None = None) -> None:
        self._module = module
        self._home = home
        self._on_wait = on_wait

    def run(self, doing: str, hint: str, *words: str, given: object = None) -> Any:
        """``hint``: what to look at if it is interrupted. ``given``: for its stdin; arguments are seen by others."""
        # -P: modules of the current folder, such as a json.py, are not ours.
        argv = [sys.executable, "-P", "-m", self._module, "--home", str(self._home.path), *words]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            answer, errors = self._wait(process, json.dumps(given).encode(), doing)
        except KeyboardInterrupt:
            process.terminate()
            process.communicate()  # what it has begun to replace, it replaces
            raise Interrupted(f"interrupted: {doing}", hint=hint) from None
        try:
            found = json.loads(answer)
        except ValueError as error:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise UgroError(f"{doing} failed: {''.join(last) or 'it was killed'}") from error
        if "error" in found:
            raise error_from_wire(found["error"])
        return found

    def _wait(self, process: subprocess.Popen[bytes], given: bytes | None, doing: str) -> tuple[bytes, bytes]:
        since = time.monotonic()
        while True:
            try:
                return process.communicate(given, timeout=_SHOW_AFTER_S)
            except subprocess.TimeoutExpired:
                given = None  # it is on its way
                if self._on_wait:
                    self._on_wait(f"{doing}, {time.monotonic() - since:.0f} s")


# --- backups ----------------------------------------------------------------------------------------------------------
# Backups of the agent's state: ``client.backups``. They need no running agent.


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
        asked = Program("ugro.kernel.agent.backups", self._home, self._on_wait)
        return asked.run(doing, "see what there is: ugro agent restore --list", what, "--", *words)


# --- stores -----------------------------------------------------------------------------------------------------------
# Where the agent's state is kept: ``client.stores``. They need no running agent.


_HINT = "see where the state is: ugro store status"


class Stores:
    def __init__(self, home: StateDir, on_wait: Callable[[str], None] | None = None) -> None:
        self._program = Program("ugro.kernel.store.relocation", home, on_wait)

    def status(self) -> StoreStatus:
        answer = self._program.run("looking at the state", _HINT, given={})
        return decode(StoreStatus, answer["store"])

    def move(self, to: str, password_file: Path | str | None = None) -> Moved:
        """``to``: the URL of a PostgreSQL database without a password, or ``sqlite``. Refused while an agent runs."""
        answer = self._program.run("moving the state", _HINT, given=_wish(to, password_file))
        return decode(Moved, answer["moved"])

    def check(self, to: str, password_file: Path | str | None = None) -> None:
        """Raises why it could not be moved there; changes nothing."""
        self._program.run("looking at the target", _HINT, given={**_wish(to, password_file), "checks_only": True})


def _wish(to: str, password_file: Path | str | None) -> dict[str, object]:
    file = os.path.abspath(os.path.expanduser(password_file)) if password_file is not None else None
    return {"to": to, "password_file": file}
