"""What was installed on the nodes of each attempt; equal environments are stored once."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ugro.core.environment import Environment
from ugro.core.support.codec import decode, dumps
from ugro.store.connection import Connection
from ugro.store.engine import Database


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
