"""Pages of jobs, the newest first. A page begins at an id, so later pages cost no more than the first."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from ugro.core.job import Job, JobState
from ugro.store.engine import Database
from ugro.store.job_rows import readable_jobs


@dataclass(frozen=True, slots=True)
class Listed:
    """Which jobs to list."""

    states: tuple[JobState, ...] = ()
    text: str = ""  # part of the job's name or its user's, in any case
    before: int | None = None  # only ids below this one
    after: int | None = None  # only ids above this one: the previous page
    limit: int = 50


class ListingStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, wanted: Listed) -> list[Job]:
        return await self._database.run(lambda db: _page(db, wanted))

    async def counts(self) -> Mapping[JobState, int]:
        """How many jobs are in each state; states without jobs are left out."""
        query = "SELECT state, COUNT(*) AS count FROM jobs GROUP BY state"
        return await self._database.run(lambda db: {JobState(row["state"]): row["count"] for row in db.execute(query)})


def _page(db: sqlite3.Connection, wanted: Listed) -> list[Job]:
    clauses, values = ["1"], list[object]()
    if wanted.states:
        clauses.append(f"state IN ({','.join('?' * len(wanted.states))})")
        values += wanted.states
    if wanted.text:
        clauses.append("(instr(lower(name), ?) OR instr(lower(user_name), ?))")
        values += [wanted.text.lower()] * 2
    if wanted.before is not None:
        clauses.append("id < ?")
        values.append(wanted.before)
    if wanted.after is not None:
        clauses.append("id > ?")
        values.append(wanted.after)
    order = "ASC" if wanted.after is not None else "DESC"
    query = f"SELECT * FROM jobs WHERE {' AND '.join(clauses)} ORDER BY id {order} LIMIT ?"
    found = readable_jobs(db.execute(query, [*values, wanted.limit]))
    return found[::-1] if wanted.after is not None else found
