"""Which packages a request was resolved to, and which files are sent for an environment."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from ugro.core.job import FINAL_STATES, JobState
from ugro.core.python_env import Blob
from ugro.core.support import clock
from ugro.core.support.codec import decode, dumps
from ugro.store.connection import Connection
from ugro.store.engine import Database

_DAY = len("2026-01-31")  # of a time as it is written
_LIVE = ",".join(f"'{state}'" for state in sorted(frozenset(JobState) - FINAL_STATES))
# ``at`` is exact to the day.
_UNUSED = (
    "SELECT request, name FROM resolutions WHERE at < ? "
    f"AND at < COALESCE((SELECT substr(MIN(submitted_at), 1, {_DAY}) FROM jobs WHERE state IN ({_LIVE})), 'never') "
    "AND name NOT IN (SELECT json_extract(content, '$.name') FROM environments "
    "WHERE json_extract(content, '$.name') IS NOT NULL)"
)


@dataclass(frozen=True, slots=True)
class Resolution:
    name: str  # of the environment
    requirements: str  # every package with its version and hashes


@dataclass(frozen=True, slots=True)
class EnvFiles:
    """The installer and the wheels for an environment, in the content store."""

    tree: str
    installer: Blob | None = None
    wheels: tuple[Blob, ...] = ()


class PythonEnvStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def resolution(self, request: str) -> Resolution | None:
        """Notes that it was asked for."""
        return await self._database.run(lambda db: _asked(db, request))

    async def keep_resolution(self, request: str, found: Resolution) -> None:
        await self._database.run(lambda db: _keep(db, request, found))

    async def files(self, key: str) -> EnvFiles | None:
        """``key``: the environment's name; of what is not everybody's, the request and the name: REQUEST/NAME."""
        query = "SELECT content FROM environment_files WHERE name = ?"
        row = await self._database.run(lambda db: db.execute(query, (key,)).fetchone())
        return decode(EnvFiles, json.loads(row["content"])) if row is not None else None

    async def keep_files(self, key: str, files: EnvFiles) -> None:
        query = (
            "INSERT INTO environment_files (name, tree, content) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET tree = excluded.tree, content = excluded.content"
        )
        await self._database.run(lambda db: db.execute(query, (key, files.tree, dumps(files))))

    async def remove_unused(self, before: str, kept: Collection[str], limit: int) -> int:
        """What nobody asked for since, and neither a job nor ``kept`` (environments on nodes) names.

        Returns how many resolutions went; the records of their files go with them. What was asked for since the oldest
        job that has not ended was submitted may be what that job asks for again.
        """
        return await self._database.run(lambda db: _remove_unused(db, before, kept, limit))

    async def has_unused(self, before: str) -> bool:
        query = f"SELECT EXISTS ({_UNUSED})"
        return await self._database.run(lambda db: bool(db.execute(query, (before,)).fetchone()[0]))


def _asked(db: Connection, request: str) -> Resolution | None:
    query = "SELECT name, requirements, at FROM resolutions WHERE request = ?"
    row = db.execute(query, (request,)).fetchone()
    if row is None:
        return None
    if row["at"][:_DAY] != (now := clock.now().at)[:_DAY]:  # once a day is enough
        db.execute("UPDATE resolutions SET at = ? WHERE request = ?", (now, request))
    return Resolution(row["name"], row["requirements"])


def _keep(db: Connection, request: str, found: Resolution) -> None:
    db.execute(
        "INSERT INTO resolutions (request, name, requirements, at) VALUES (?, ?, ?, ?) ON CONFLICT (request) DO UPDATE "
        "SET name = excluded.name, requirements = excluded.requirements, at = excluded.at",
        (request, found.name, found.requirements, clock.now().at),
    )


def _remove_unused(db: Connection, before: str, kept: Collection[str], limit: int) -> int:
    found = [(row["request"],) for row in db.execute(_UNUSED, (before,)) if row["name"] not in kept][:limit]
    db.executemany("DELETE FROM resolutions WHERE request = ?", found)
    keys = "SELECT name FROM resolutions UNION SELECT request || '/' || name FROM resolutions"
    db.execute(f"DELETE FROM environment_files WHERE name NOT IN ({keys})")
    return len(found)
