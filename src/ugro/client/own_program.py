"""Programs of the agent that need no running agent: only they know its state, so they run in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ugro.core.errors import Interrupted, UgroError, error_from_wire
from ugro.core.support.state_dir import StateDir

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
