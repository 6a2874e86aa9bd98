"""Rows of events as values."""

from __future__ import annotations

from ugro.core.event import Event
from ugro.store.connection import Connection, Row


def event_of(row: Row) -> Event:
    return Event(row["seq"], row["at"], row["kind"], row["text"], row["job"], row["attempt"], row["node"])


def newest_event(db: Connection) -> int:
    """The number of the newest event, or 0."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) AS seq FROM events").fetchone()["seq"])
