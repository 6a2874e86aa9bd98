"""What is known about this machine's clock, for the next agent."""

from __future__ import annotations

import json

from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.policy.lifecycle.clock import Memory
from ugro.store.connection import Connection
from ugro.store.engine import Database

_KEY = "clock"


class ClockStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Memory | None:
        return await self._database.run(_read)

    async def write(self, memory: Memory) -> None:
        query = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        await self._database.run(lambda db: db.execute(query, (_KEY, dumps(memory))), counts=False)


def _read(db: Connection) -> Memory | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_KEY,)).fetchone()
    try:
        return decode(Memory, json.loads(row["value"])) if row is not None else None
    except (DecodeError, ValueError):  # of another version
        return None
