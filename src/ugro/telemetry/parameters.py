"""The parameters that trainings wrote beside their metrics. SQL stays here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ugro.core.support.secret import is_secret
from ugro.store.connection import Connection, Row

_MOST = 200  # of one job


def write_parameters(db: Connection, owner: str, given: Mapping[str, str]) -> None:
    """Those that look secret are left out."""
    known = {row["name"] for row in db.execute("SELECT name FROM parameter WHERE owner = ?", (owner,))}
    room = _MOST - len(known)
    for name, value in given.items():
        if is_secret(name, value):
            continue
        room -= name not in known
        if name in known or room >= 0:
            db.execute("INSERT OR REPLACE INTO parameter (owner, name, value) VALUES (?, ?, ?)", (owner, name, value))


def read_parameters(db: Connection, owners: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """By owner and name. ``None``: of all jobs."""
    found: dict[str, dict[str, str]] = {}
    for row in _rows(db, owners):
        found.setdefault(row["owner"], {})[row["name"]] = row["value"]
    return found


def _rows(db: Connection, owners: Sequence[str] | None) -> Iterable[Row]:
    if owners is None:
        yield from db.execute("SELECT * FROM parameter ORDER BY owner, name")
    for owner in owners or ():
        yield from db.execute("SELECT * FROM parameter WHERE owner = ? ORDER BY name", (owner,))
