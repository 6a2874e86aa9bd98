"""What a rank has to say about its run besides its log: UGRO shows it in ``ugro status``, ``ugro why`` and on the page.

It goes to a file in the run's folder on the node, which the supervisor reads. Outside UGRO it is only logged.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import time
from pathlib import Path

log = logging.getLogger("ugro.train")

_EVERY_S = 2.0
_MOST = 4
_LONGEST = 200


class Notices:
    def __init__(self, folder: Path | None, run_name: str, rank: int) -> None:
        self._folder, self._run_name, self._rank = folder, run_name, rank
        self._said: dict[str, str] = {}
        self._write_at = 0.0
        self._is_pending = False

    def say(self, key: str, text: str, *, is_logged: bool = True) -> None:
        """The newest text of a key holds. Files are written now and then only, and at the end."""
        if is_logged:
            log.warning("%s", text)
        if key not in self._said and len(self._said) >= _MOST:
            return
        if not self._said:
            atexit.register(self.write)
        is_new = key not in self._said
        self._said[key] = text[:_LONGEST]
        self._is_pending = True
        if is_new or time.monotonic() >= self._write_at:
            self.write()

    def unsay(self, key: str) -> None:
        """It is no longer so."""
        if self._said.pop(key, None) is not None:
            self._is_pending = True
            self.write()

    def write(self) -> None:
        if not self._is_pending or self._folder is None:
            return
        self._is_pending, self._write_at = False, time.monotonic() + _EVERY_S
        with contextlib.suppress(OSError):  # a full disk must not end the training
            folder = self._folder / "notices"
            folder.mkdir(exist_ok=True)
            unfinished = folder / f".{self._rank}"
            unfinished.write_text(json.dumps({"run": self._run_name, "notices": list(self._said.values())}))
            unfinished.rename(folder / f"{self._rank}.json")
