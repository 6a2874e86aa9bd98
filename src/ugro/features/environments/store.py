"""Which packages a request was resolved to, and which files are sent for an environment."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ugro.features.environments.model import Blob
from ugro.kernel.jobs.model import FINAL_STATES, Environment, JobState
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import decode, dumps

# --- environments -----------------------------------------------------------------------------------------------------
# What was installed on the nodes of each attempt; equal environments are stored once.


class EnvironmentStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, job: int, attempt: int, found: Mapping[str, Environment]) -> None:
        """By node. The first record is kept: it was made before anything ran."""
        await self._database.run(lambda db: _record(db, job, attempt, found))

    async def of(self, job: int, attempt: int) -> dict[str, Environment]:
        query = (
            "SELECT node, content FROM attempt_environments JOIN environments USING (hash) "
            "WHERE job = ? AND attempt = ? ORDER BY node"
        )
        return await self._database.run(
            lambda db: {
                row["node"]: decode(Environment, json.loads(row["content"]))
                for row in db.execute(query, (job, attempt))
            }
        )


def _record(db: Connection, job: int, attempt: int, found: Mapping[str, Environment]) -> None:
    for node, environment in found.items():
        fingerprint = environment.fingerprint
        db.execute(
            "INSERT INTO environments (hash, content) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING",
            (fingerprint, dumps(environment)),
        )
        db.execute(
            "INSERT INTO attempt_environments (job, attempt, node, hash) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (job, attempt, node) DO NOTHING",
            (job, attempt, node, fingerprint),
        )


# --- python envs ------------------------------------------------------------------------------------------------------


_DAY = len("2026-01-31")  # of a time as it is written
_LIVE = ",".join(f"'{state}'" for state in sorted(frozenset(JobState) - FINAL_STATES))
# ``at`` is exact to the day.
_UNUSED = (
    "SELECT request, name FROM resolutions WHERE at < ? "
    f"AND at < COALESCE((SELECT substr(MIN(submitted_at), 1, {_DAY}) FROM jobs WHERE state IN ({_LIVE})), 'never')"
)
_PAGE = 100


@dataclass(frozen=True, slots=True)
class Resolution:
    name: str  # of the environment
    requirements: str  # every package with its version and hashes


@dataclass(frozen=True, slots=True)
class EnvFiles:
    """The installer and the wheels for an environment, in the content store."""

    tree: str
    installer: Blob
    wheels: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True)
class _Named:
    """What of an Environment is needed here."""

    name: str | None = None


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
        return await self._database.run(lambda db: bool(_unused(db, before)))


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
    found = [(request,) for request, name in _unused(db, before) if name not in kept][:limit]
    db.executemany("DELETE FROM resolutions WHERE request = ?", found)
    keys = "SELECT name FROM resolutions UNION SELECT request || '/' || name FROM resolutions"
    db.execute(f"DELETE FROM environment_files WHERE name NOT IN ({keys})")
    return len(found)


def _unused(db: Connection, before: str) -> list[tuple[str, str]]:
    """Requests that no job's environment needs, and the names they were resolved to."""
    found = [(str(row["request"]), str(row["name"])) for row in db.execute(_UNUSED, (before,))]
    named = set(_named(db)) if found else set()
    return [one for one in found if one[1] not in named]


def _named(db: Connection) -> Iterator[str | None]:
    """Of environments that jobs ran in. Not read by the database: PostgreSQL refuses some of what nodes report."""
    query, after = "SELECT hash, content FROM environments WHERE hash > ? ORDER BY hash LIMIT ?", ""
    while rows := db.execute(query, (after, _PAGE)).fetchall():
        yield from (_name_in(row["content"]) for row in rows)
        after = rows[-1]["hash"]


def _name_in(content: str) -> str | None:
    try:
        return decode(_Named, json.loads(content)).name
    except ValueError:  # it names nothing
        return None
