"""Removal of ended jobs: candidates, announcements and the removal itself, in small transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ugro.kernel.jobs.model import FINAL_STATES, Job, JobState
from ugro.kernel.jobs.rows import readable_jobs
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support.moments import Instant, instant_of

_FIRST_EVENTS = 100  # of a job, which are never trimmed
_FINAL = ",".join(f"'{state}'" for state in sorted(FINAL_STATES))
# The rows of a job, those that refer to others first.
_PARTS = (
    ("notes", "job"), ("forecasts", "job"), ("to_keep", "job"), ("small_logs", "job"), ("job_energy", "job"),
    ("attempt_environments", "job"), ("attempts", "job"), ("events", "job"), ("jobs", "id"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    id: int
    state: JobState
    ended: Instant
    has_note: bool
    is_source: bool
    is_pending: bool
    are_results_removed: bool


@dataclass(frozen=True, slots=True)
class Due:
    job: int
    what: str


class RetentionStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def ended(self, before: str, after_id: int, limit: int) -> list[Ended]:
        """Jobs that ended before a time and whose removal is not announced, by id."""
        clause = "j.id > ? AND j.ended_at < ? AND j.id NOT IN (SELECT job FROM removals)"
        return await self._database.run(lambda db: _ended(db, clause, (after_id, before), limit))

    async def of(self, jobs: Sequence[int]) -> list[Ended]:
        return await self._database.run(lambda db: _of(db, jobs))

    async def first_kept(self, keep: int) -> int:
        """The id of the oldest of the ``keep`` newest ended jobs; 0 if there are fewer."""
        query = f"SELECT id FROM jobs WHERE state IN ({_FINAL}) ORDER BY id DESC LIMIT 1 OFFSET ?"
        row = await self._database.run(lambda db: db.execute(query, (keep - 1,)).fetchone() if keep else (1 << 62,))
        return int(row[0]) if row is not None else 0

    async def followed(self) -> set[int]:
        """The jobs that a job which has not ended runs after."""
        return await self._database.run(_followed)

    async def announce(self, wanted: Iterable[Due], due_at: float, at: str, text: str) -> None:
        rows = [(one.job, one.what, due_at) for one in wanted]
        await self._database.run(lambda db: _announce(db, rows, at, text))

    async def due(self, now: float, limit: int) -> list[Due]:
        query = "SELECT job, what FROM removals WHERE due_at <= ? ORDER BY due_at, job LIMIT ?"
        return await self._database.run(lambda db: [Due(*row) for row in db.execute(query, (now, limit))])

    async def postpone(self, job: int, due_at: float) -> None:
        query = "UPDATE removals SET due_at = ? WHERE job = ?"
        await self._database.run(lambda db: db.execute(query, (due_at, job)))

    async def withdraw(self, jobs: Iterable[int]) -> None:
        rows = [(job,) for job in jobs]
        await self._database.run(lambda db: db.executemany("DELETE FROM removals WHERE job = ?", rows))

    async def remove(self, jobs: Sequence[int], at: str, say: Callable[[Sequence[int]], str]) -> list[int]:
        """Returns the removed jobs: one that has become needed meanwhile stays. ``say`` gives the event's text."""
        return await self._database.run(lambda db: _remove(db, jobs, at, say))

    async def remove_events(self, before: str, limit: int) -> int:
        """Old events that belong to no job. Returns how many."""
        query = "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE job IS NULL AND at < ? LIMIT ?)"
        return await self._database.run(lambda db: db.execute(query, (before, limit)).rowcount)

    async def trim_events(self, most: int, limit: int) -> int:
        """Of jobs with more events than that: those after the first ones, the oldest. Returns how many."""
        return await self._database.run(lambda db: _trim(db, most, limit))


def _trim(db: Connection, most: int, limit: int) -> int:
    query = "SELECT job, COUNT(*) AS count FROM events WHERE job IS NOT NULL GROUP BY job HAVING COUNT(*) > ? LIMIT 1"
    if (found := db.execute(query, (most,)).fetchone()) is None:
        return 0
    first = min(_FIRST_EVENTS, most)
    query = "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE job = ? ORDER BY seq LIMIT ? OFFSET ?)"
    return db.execute(query, (found["job"], min(limit, found["count"] - most), first)).rowcount


def _ended(db: Connection, clause: str, values: Sequence[object], limit: int) -> list[Ended]:
    query = (
        "SELECT j.id, j.state, j.ended_at, j.ended_boot, j.results_removed_at IS NOT NULL AS are_removed, "
        "EXISTS (SELECT 1 FROM notes n WHERE n.job = j.id AND (n.text <> '' OR n.tags <> '[]')) AS has_note, "
        "EXISTS (SELECT 1 FROM jobs o WHERE o.cached_from = j.id) AS is_source, "
        "EXISTS (SELECT 1 FROM to_keep k WHERE k.job = j.id) AS is_pending "
        f"FROM jobs j WHERE j.state IN ({_FINAL}) AND j.ended_at IS NOT NULL AND {clause} ORDER BY j.id LIMIT ?"
    )
    return [_row(row) for row in db.execute(query, (*values, limit))]


def _row(row: Row) -> Ended:
    return Ended(
        row["id"], JobState(row["state"]), instant_of(row["ended_at"], row["ended_boot"]), bool(row["has_note"]),
        bool(row["is_source"]), bool(row["is_pending"]), bool(row["are_removed"]),
    )  # fmt: skip


def _of(db: Connection, jobs: Sequence[int]) -> list[Ended]:
    if not jobs:
        return []
    return _ended(db, f"j.id IN ({','.join('?' * len(jobs))})", jobs, len(jobs))


def _announce(db: Connection, rows: Sequence[tuple[int, str, float]], at: str, text: str) -> None:
    db.executemany("INSERT INTO removals (job, what, due_at) VALUES (?, ?, ?)", rows)
    _note(db, at, text)


def _remove(db: Connection, jobs: Sequence[int], at: str, say: Callable[[Sequence[int]], str]) -> list[int]:
    # Checked again, because a note or a dependent job may have come after the decision.
    followed = _followed(db)
    gone = [
        one.id
        for one in _of(db, jobs)
        if not (one.has_note or one.is_source or one.is_pending or one.id in followed)
    ]
    for table, column in _PARTS:
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(job,) for job in gone])
    db.execute("DELETE FROM environments WHERE hash NOT IN (SELECT hash FROM attempt_environments)")
    if gone:
        _note(db, at, say(gone))
    return gone


def _followed(db: Connection) -> set[int]:
    query = (
        f"SELECT * FROM jobs WHERE state NOT IN ({_FINAL}) "
        "AND spec LIKE '%\"after\":{%' AND spec NOT LIKE '%\"after\":{\"ok\":[],\"any\":[]}%'"
    )
    found: list[Job] = readable_jobs(db.execute(query))
    return {number for job in found for number in (*job.spec.after.ok, *job.spec.after.any)}


def _note(db: Connection, at: str, text: str) -> None:
    db.execute("INSERT INTO events (at, kind, text) VALUES (?, 'retention', ?)", (at, text))
