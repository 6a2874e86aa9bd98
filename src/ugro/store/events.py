"""Rows of events as values."""

from __future__ import annotations

import sqlite3

from ugro.core.event import Event


def event_of(row: sqlite3.Row) -> Event:
    return Event(row["seq"], row["at"], row["kind"], row["text"], row["job"], row["attempt"], row["node"])


def newest_event(db: sqlite3.Connection) -> int:
    """The number of the newest event, or 0."""
    return int(db.execute("SELECT COALESCE(MAX(seq), 0) AS seq FROM events").fetchone()["seq"])
