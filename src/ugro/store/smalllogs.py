"""Logs of small commands, recorded together with their end."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.store.connection import Connection


@dataclass(frozen=True, slots=True)
class SmallLog:
    """Everything the ranks of a job's last attempt wrote."""

    job: int
    attempt: int
    ranks: tuple[tuple[int, bytes], ...]


def put(db: Connection, log: SmallLog) -> None:
    db.executemany(
        "INSERT INTO small_logs (job, attempt, rank, content) VALUES (?, ?, ?, ?)",
        [(log.job, log.attempt, rank, content) for rank, content in log.ranks],
    )


def read(db: Connection, job: int) -> tuple[SmallLog, str] | None:
    """With the time at which the job ended."""
    query = (
        "SELECT l.attempt, l.rank, l.content, j.ended_at FROM small_logs l JOIN jobs j ON j.id = l.job "
        "WHERE l.job = ? ORDER BY l.rank"
    )
    rows = db.execute(query, (job,)).fetchall()
    if not rows:
        return None
    log = SmallLog(job, rows[0]["attempt"], tuple((row["rank"], row["content"]) for row in rows))
    return log, str(rows[0]["ended_at"])
