"""Logs of small commands, recorded together with their end, until they are in files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreshLog:
    """All that the ranks of a job's last attempt wrote."""

    job: int
    attempt: int
    ranks: tuple[tuple[int, bytes], ...]


def put(db: sqlite3.Connection, log: FreshLog) -> None:
    db.executemany(
        "INSERT INTO fresh_logs (job, attempt, rank, content) VALUES (?, ?, ?, ?)",
        [(log.job, log.attempt, rank, content) for rank, content in log.ranks],
    )


def read_all(db: sqlite3.Connection) -> list[FreshLog]:
    found: dict[int, FreshLog] = {}
    for job, attempt, rank, content in db.execute("SELECT job, attempt, rank, content FROM fresh_logs"):
        known = found[job].ranks if job in found else ()
        found[job] = FreshLog(job, attempt, (*known, (rank, content)))
    return list(found.values())


def forget(db: sqlite3.Connection, jobs: Iterable[int]) -> None:
    db.executemany("DELETE FROM fresh_logs WHERE job = ?", [(job,) for job in jobs])
