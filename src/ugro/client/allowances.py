"""Allows cluster files that are found in folders, without an agent: none is started before its file is allowed."""

from __future__ import annotations

from pathlib import Path

from ugro.config.allowance import Allowances, effects_of
from ugro.core.errors import Unallowed
from ugro.core.support.state_dir import StateDir


def require(home: StateDir, path: Path) -> tuple[str, ...]:
    """What the file does, which is allowed. Raises Unallowed."""
    effects = effects_of(path)
    Allowances(home).require(effects)
    return effects.lines


def allow(home: StateDir, shown: Unallowed) -> None:
    """Exactly what the error shows, whatever the file has become since."""
    Allowances(home).add(shown.file, shown.digest, shown.lines)


def deny(home: StateDir, path: Path) -> bool:
    """False if nothing was allowed."""
    return Allowances(home).remove(str(path.resolve()))
