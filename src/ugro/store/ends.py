"""Ended jobs in the order in which they ended, for metrics and notifications."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.job import FINAL_STATES, JobState
from ugro.core.support.moment import elapsed_s, instant_of
from ugro.store.connection import Connection, Row
from ugro.store.engine import Database
from ugro.store.events import newest_event

_FINAL = sorted(FINAL_STATES)


@dataclass(frozen=True, slots=True)
class End:
    seq: int  # of its event
    at: str
    job: int
    attempt: int
    name: str
    state: JobState
    reason: str
    lasted_s: float | None  # None: it was never started
    has_notify: bool  # the job names channels to notify


class EndStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def newest(self) -> int:
        """The number of the newest event."""
        return await self._database.run(newest_event)

    async def after(self, seq: int, limit: int = 5000) -> list[End]:
        return await self._database.run(lambda db: _after(db, seq, limit))


def _after(db: Connection, seq: int, limit: int) -> list[End]:
    # The empty text keeps databases from using the index by kind: in the order of events they can stop at the limit.
    query = (
        "SELECT e.seq, e.at, e.job, e.attempt, j.name, e.kind, e.text, j.started_at, j.started_boot, "
        "j.ended_at, j.ended_boot, j.spec NOT LIKE '%\"notify\":[]%' AS has_notify "
        "FROM events e JOIN jobs j ON j.id = e.job "
        f"WHERE e.seq > ? AND e.kind || '' IN ({','.join('?' * len(_FINAL))}) ORDER BY e.seq LIMIT ?"
    )
    return [_end(row) for row in db.execute(query, (seq, *_FINAL, limit))]


def _end(row: Row) -> End:
    return End(
        row["seq"], row["at"], row["job"], row["attempt"], row["name"], JobState(row["kind"]), row["text"],
        _lasted_s(row), bool(row["has_notify"]),
    )  # fmt: skip


def _lasted_s(row: Row) -> float | None:
    if not row["started_at"] or not row["ended_at"]:
        return None
    started = instant_of(row["started_at"], row["started_boot"])
    return elapsed_s(started, instant_of(row["ended_at"], row["ended_boot"]))
