"""What small commands wrote, recorded together with their end."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SmallLog:
    """All that the ranks of a job's last attempt wrote."""

    job: int
    attempt: int
    ranks: tuple[tuple[int, bytes], ...]


def put(db: sqlite3.Connection, log: SmallLog) -> None:
    db.executemany(
        "INSERT INTO small_logs (job, attempt, rank, content) VALUES (?, ?, ?, ?)",
        [(log.job, log.attempt, rank, content) for rank, content in log.ranks],
    )


def read(db: sqlite3.Connection, job: int) -> SmallLog | None:
    query = "SELECT attempt, rank, content FROM small_logs WHERE job = ? ORDER BY rank"
    rows = db.execute(query, (job,)).fetchall()
    return SmallLog(job, rows[0]["attempt"], tuple((row["rank"], row["content"]) for row in rows)) if rows else None
