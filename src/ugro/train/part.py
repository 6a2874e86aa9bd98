"""How much of an equal share this rank is to take: less while the owner of its machine uses it.

The agent writes it to a file in the run's folder on the node. Each rank looks at most once per second, and sends what
it found with its measurements, so that all ranks know it in the same step.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

_LOOK_S = 1.0
_FILE = "part.json"
_MOST_BYTES = 4096


class PartOfShare:
    def __init__(self, run_folder: Path | None, run_name: str) -> None:
        """Without a folder, as outside UGRO, nobody can ask for less."""
        self._path = None if run_folder is None else run_folder / _FILE
        self._run_name = run_name
        self._next_look = 0.0
        self._part = 1.0

    def asked(self) -> float:
        now = time.monotonic()
        if self._path is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._part = self._read(self._path)
        return self._part

    def _read(self, path: Path) -> float:
        try:
            with path.open("rb") as file:
                word = json.loads(file.read(_MOST_BYTES))
            part = float(word["part"])
            if word["run"] != self._run_name:  # of an earlier run in the same folder
                return 1.0
            return part if 0 < part <= 1 else self._part
        except FileNotFoundError:
            return 1.0
        except (OSError, ValueError, KeyError, TypeError):
            return self._part
