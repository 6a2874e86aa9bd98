"""Notes and tags of jobs on disk, and the jobs that have changed since an event."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ugro.features.experiments.model import Note
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.rows import newest_event, readable_jobs
from ugro.kernel.store.connection import Connection, Cursor, Row
from ugro.kernel.store.engine import Database

_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Changed:
    seq: int  # of the newest event that is in it
    jobs: tuple[Job, ...]
    notes: tuple[Note, ...]


class NoteStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, job: int) -> Note:
        return await self._database.run(lambda db: _get(db, job))

    async def change(self, job: int, change: Callable[[Note], Note]) -> Note:
        """``change`` gets the current note, so two clients that add a tag at once both succeed."""
        return await self._database.run(lambda db: _change(db, job, change))

    async def changed(self, after: int, most: int) -> Changed:
        """Jobs that were submitted, moved or got a note after that event; only the ``most`` newest jobs count."""
        return await self._database.run(lambda db: _changed(db, after, most))


def _get(db: Connection, job: int) -> Note:
    row = db.execute("SELECT * FROM notes WHERE job = ?", (job,)).fetchone()
    return _note(row) if row is not None else Note(job)


def _change(db: Connection, job: int, change: Callable[[Note], Note]) -> Note:
    old = _get(db, job)
    new = change(old)
    if (new.text, new.tags) == (old.text, old.tags):
        return old
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    db.execute(
        "INSERT INTO notes (job, text, tags, changed_at) VALUES (?, ?, ?, ?) ON CONFLICT (job) DO UPDATE "
        "SET text = excluded.text, tags = excluded.tags, changed_at = excluded.changed_at",
        (job, new.text, json.dumps(new.tags), now),
    )
    news = {"note": new.text != old.text, "tags": new.tags != old.tags}
    what = " and ".join(word for word, is_new in news.items() if is_new)
    db.execute("INSERT INTO events (at, job, kind, text) VALUES (?, ?, 'note', ?)", (now, job, f"its {what} changed"))
    return Note(job, new.text, new.tags, now)


def _changed(db: Connection, after: int, most: int) -> Changed:
    seq = newest_event(db)
    if seq == after:
        return Changed(seq, (), ())
    newest = db.execute("SELECT id FROM jobs ORDER BY id DESC LIMIT 1 OFFSET ?", (most - 1,)).fetchone()
    least = newest["id"] if newest is not None else 0
    if after == 0:
        jobs = readable_jobs(db.execute("SELECT * FROM jobs WHERE id >= ?", (least,)))
        notes = [_note(row) for row in db.execute("SELECT * FROM notes WHERE job >= ?", (least,))]
        return Changed(seq, tuple(jobs), tuple(notes))
    query = "SELECT DISTINCT job FROM events WHERE seq > ? AND job >= ?"
    numbers = [row["job"] for row in db.execute(query, (after, least)).fetchall()]
    some = [readable_jobs(rows) for rows in _in(db, "SELECT * FROM jobs WHERE id", numbers)]
    written = [_note(row) for rows in _in(db, "SELECT * FROM notes WHERE job", numbers) for row in rows]
    return Changed(seq, tuple(job for jobs in some for job in jobs), tuple(written))


def _in(db: Connection, query: str, numbers: Sequence[int]) -> Iterable[Cursor]:
    for begin in range(0, len(numbers), _AT_ONCE):
        some = numbers[begin : begin + _AT_ONCE]
        yield db.execute(f"{query} IN ({','.join('?' * len(some))})", some)


def _note(row: Row) -> Note:
    return Note(row["job"], row["text"], tuple(json.loads(row["tags"])), row["changed_at"])
