"""Events: written with the change that they tell of, and read as values."""

from __future__ import annotations

from ugro.core.event import Event
from ugro.core.job import Job
from ugro.core.support import clock
from ugro.store.connection import Connection, Row


def event_of(row: Row) -> Event:
    return Event(row["seq"], row["at"], row["kind"], row["text"], row["job"], row["attempt"], row["node"])


def newest_event(db: Connection) -> int:
    """The number of the newest event, or 0."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) AS seq FROM events").fetchone()["seq"])


def note(db: Connection, kind: str, text: str, job: Job | None, node: str | None) -> None:
    db.execute(
        "INSERT INTO events (at, job, attempt, node, kind, text) VALUES (?, ?, ?, ?, ?, ?)",
        (clock.now().at, job.id if job else None, job.attempt if job else None, node, str(kind), text),
    )
