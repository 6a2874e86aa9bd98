"""Where the agent's state is kept: ``client.stores``. They need no running agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ugro.client.own_program import Program
from ugro.core.store import Moved, StoreStatus
from ugro.core.support.codec import decode
from ugro.core.support.state_dir import StateDir

_HINT = "see where the state is: ugro store status"


class Stores:
    def __init__(self, home: StateDir, on_wait: Callable[[str], None] | None = None) -> None:
        self._program = Program("ugro.agent.relocation", home, on_wait)

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
