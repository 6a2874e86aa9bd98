"""Trials of trainings and predictions of jobs on disk. If there are too many trials, the oldest go first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ugro.features.planning.model import Forecast
from ugro.kernel.jobs.model import FINAL_STATES, JobState
from ugro.kernel.store.connection import NO_LIMIT, Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support.codec import DecodeError, decode, dumps

MOST_TRIALS = 2000
_LIVE = tuple(frozenset(JobState) - FINAL_STATES)
T = TypeVar("T")


class TrialStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, kind: type[T], keys: Sequence[str]) -> dict[str, T]:
        """Those that are known, by key."""
        if not keys:
            return {}
        query = f"SELECT key, content FROM trials WHERE key IN ({','.join('?' * len(keys))})"
        rows = await self._database.run(lambda db: db.execute(query, tuple(keys)).fetchall())
        found = {row["key"]: _read(kind, row["content"]) for row in rows}
        return {key: one for key, one in found.items() if one is not None}

    async def put(self, found: Mapping[str, object], at: str) -> None:
        rows = [(key, dumps(content), at) for key, content in found.items()]
        await self._database.run(lambda db: _put(db, rows))

    async def jobs_under_way(self, key: str) -> list[int]:
        """The trials that have not ended: jobs whose keys begin so."""
        query = (
            f"SELECT id FROM jobs WHERE state IN ({','.join('?' * len(_LIVE))}) AND substr(submit_key, 1, ?) = ? "
            "ORDER BY id"
        )
        values = (*_LIVE, len(key), key)
        return await self._database.run(lambda db: [row["id"] for row in db.execute(query, values)])

    async def note(self, job: int, forecast: Forecast) -> None:
        """The first one stays: it was made before the job began."""
        query = "INSERT INTO forecasts (job, content) VALUES (?, ?) ON CONFLICT (job) DO NOTHING"
        await self._database.run(lambda db: db.execute(query, (job, dumps(forecast))))

    async def forecast(self, job: int) -> Forecast | None:
        query = "SELECT content FROM forecasts WHERE job = ?"
        row = await self._database.run(lambda db: db.execute(query, (job,)).fetchone())
        return None if row is None else _read(Forecast, row["content"])


def _put(db: Connection, rows: Sequence[tuple[str, str, str]]) -> None:
    db.executemany(
        "INSERT INTO trials (key, content, made_at) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
        "SET content = excluded.content, made_at = excluded.made_at",
        rows,
    )
    oldest = f"SELECT key FROM trials ORDER BY made_at DESC, key LIMIT {NO_LIMIT} OFFSET ?"
    db.execute(f"DELETE FROM trials WHERE key IN ({oldest})", (MOST_TRIALS,))


def _read(kind: type[T], content: str) -> T | None:
    """None: another version wrote something else, which is measured again."""
    try:
        return decode(kind, json.loads(content))
    except (DecodeError, ValueError):
        return None
