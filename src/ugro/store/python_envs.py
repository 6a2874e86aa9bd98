"""Which packages a request was resolved to, and which files are sent for an environment."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime

from ugro.core.python_env import Blob
from ugro.core.support.codec import decode, dumps
from ugro.store.engine import Database


@dataclass(frozen=True, slots=True)
class Resolution:
    name: str  # of the environment
    requirements: str  # every package with its version and hashes
    at: str = ""  # when it was resolved


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
        query = "SELECT name, requirements, at FROM resolutions WHERE request = ?"
        row = await self._database.run(lambda db: db.execute(query, (request,)).fetchone())
        return Resolution(row["name"], row["requirements"], row["at"]) if row is not None else None

    async def keep_resolution(self, request: str, found: Resolution) -> None:
        await self._database.run(lambda db: _keep(db, request, found))

    async def files(self, name: str) -> EnvFiles | None:
        query = "SELECT content FROM environment_files WHERE name = ?"
        row = await self._database.run(lambda db: db.execute(query, (name,)).fetchone())
        return decode(EnvFiles, json.loads(row["content"])) if row is not None else None

    async def keep_files(self, name: str, files: EnvFiles) -> None:
        query = (
            "INSERT INTO environment_files (name, tree, content) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET tree = excluded.tree, content = excluded.content"
        )
        await self._database.run(lambda db: db.execute(query, (name, files.tree, dumps(files))))


def _keep(db: sqlite3.Connection, request: str, found: Resolution) -> None:
    db.execute(
        "INSERT INTO resolutions (request, name, requirements, at) VALUES (?, ?, ?, ?) ON CONFLICT (request) DO UPDATE "
        "SET name = excluded.name, requirements = excluded.requirements, at = excluded.at",
        (request, found.name, found.requirements, datetime.now(UTC).isoformat(timespec="seconds")),
    )
