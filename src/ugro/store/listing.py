"""Pages of jobs, the newest first. A page begins at an id, so later pages cost no more than the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.core.event import Event
from ugro.core.job import Job, JobState
from ugro.store.connection import Connection, Row
from ugro.store.engine import Database
from ugro.store.events import event_of
from ugro.store.job_rows import LISTED, readable_jobs
from ugro.store.visibility import VISIBLE


@dataclass(frozen=True, slots=True)
class Listed:
    """Which jobs to list."""

    states: tuple[JobState, ...] = ()
    text: str = ""  # part of the job's name or its user's, in any case
    before: int | None = None  # only ids below this one
    after: int | None = None  # only ids above this one: the previous page
    limit: int = 50
    viewer: str | None = None  # without the private jobs that this user must not see


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, with what its job is called and its state now; None without a job, or if the job was removed."""

    event: Event
    name: str | None = None
    state: JobState | None = None


class ListingStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, wanted: Listed) -> list[Job]:
        """Of a job with a large spec, the spec has only the beginning of its command, and no variables."""
        return await self._database.run(lambda db: _page(db, wanted))

    async def counts(self) -> Mapping[JobState, int]:
        """How many jobs are in each state; states without jobs are left out."""
        query = "SELECT state, COUNT(*) AS count FROM jobs GROUP BY state"
        return await self._database.run(lambda db: {JobState(row["state"]): row["count"] for row in db.execute(query)})

    async def newest_happened(self, limit: int, viewer: str | None = None) -> list[Happened]:
        """The newest events of all jobs and nodes, the newest first; of jobs, only those that ``viewer`` may see."""
        clause, values = (f"WHERE (jobs.id IS NULL OR {VISIBLE})", [viewer]) if viewer is not None else ("", [])
        query = (
            "SELECT events.*, jobs.name AS job_name, jobs.state AS job_state FROM events "
            f"LEFT JOIN jobs ON jobs.id = events.job {clause} ORDER BY events.seq DESC LIMIT ?"
        )
        return await self._database.run(lambda db: [_happened(row) for row in db.execute(query, [*values, limit])])


def _happened(row: Row) -> Happened:
    state = JobState(row["job_state"]) if row["job_state"] is not None else None
    return Happened(event_of(row), row["job_name"], state)


def _page(db: Connection, wanted: Listed) -> list[Job]:
    clauses, values = ["1 = 1"], list[object]()
    if wanted.states:
        clauses.append(f"state IN ({','.join('?' * len(wanted.states))})")
        values += wanted.states
    if wanted.text:
        clauses.append("(instr(lower(name), ?) > 0 OR instr(lower(user_name), ?) > 0)")
        values += [wanted.text.lower()] * 2
    if wanted.viewer is not None:
        clauses.append(VISIBLE)
        values.append(wanted.viewer)
    if wanted.before is not None:
        clauses.append("id < ?")
        values.append(wanted.before)
    if wanted.after is not None:
        clauses.append("id > ?")
        values.append(wanted.after)
    order = "ASC" if wanted.after is not None else "DESC"
    query = f"SELECT {LISTED} FROM jobs WHERE {' AND '.join(clauses)} ORDER BY id {order} LIMIT ?"
    found = readable_jobs(db.execute(query, [*values, wanted.limit]))
    return found[::-1] if wanted.after is not None else found
