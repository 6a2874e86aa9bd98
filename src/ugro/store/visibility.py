"""Which jobs a user may see: not the private ones of others."""

from __future__ import annotations

from collections.abc import Collection

from ugro.core.errors import NotFound
from ugro.core.job import Job
from ugro.store.connection import Connection
from ugro.store.engine import Database
from ugro.store.job_rows import job_of

VISIBLE = "(private = 0 OR user_name = ?)"  # with the user's name


class VisibilityStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, word: str, viewer: str, without: Collection[int] = ()) -> Job:
        """By name (the newest of that name), or ``last``, among the jobs that this user may see."""
        return await self._database.run(lambda db: _find(db, word, viewer, without))

    async def hidden_from(self, viewer: str | None) -> frozenset[int]:
        """The jobs that this user must not see; None sees all."""
        if viewer is None:
            return frozenset()
        query = "SELECT id FROM jobs WHERE private = 1 AND user_name <> ?"
        return await self._database.run(lambda db: frozenset(row["id"] for row in db.execute(query, (viewer,))))


def _find(db: Connection, word: str, viewer: str, without: Collection[int]) -> Job:
    where, values = VISIBLE, tuple[object, ...]((viewer,))
    if word != "last":
        where, values = f"{where} AND name = ?", (*values, word)
    if word != "last" and without:
        where, values = f"{where} AND id NOT IN ({','.join('?' * len(without))})", (*values, *without)
    row = db.execute(f"SELECT * FROM jobs WHERE {where} ORDER BY id DESC LIMIT 1", values).fetchone()
    if row is None:
        raise NotFound(f"there is no job {word!r}", hint="see: ugro status")
    return job_of(row)
