"""Rows of jobs and attempts as the types of ``model``; events; which jobs a user may see, page by page."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Attempt, Ending, Failure, Job, JobSpec, JobState, Origin, Placement, Tries
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import NotFound

# --- events -----------------------------------------------------------------------------------------------------------
# They are written with the change that they tell of.


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


# --- jobs and attempts ------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LARGEST_ID = 2**63 - 1
_LARGE = 8 << 10  # characters of a spec; a larger one is not read for a list
_SHOWN = 1 << 10  # of each of its parts that is large
# For lists: a large spec stays where it is.
LISTED = (
    "id, COALESCE(brief, spec) AS spec, user_name, state, reason, submitted_at, attempt, placement, started_at, "
    "attempt_started_at, ended_at, exit_code, ending, tries, origin, cached_from, results_removed_at, submitted_boot, "
    "started_boot, attempt_started_boot, ended_boot, submit_key"
)


def read_job(db: Connection, job: int) -> Job:
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone() if job <= _LARGEST_ID else None
    if row is None:
        raise NotFound(f"there is no job {job}", hint="see: ugro status")
    return job_of(row)


def readable_jobs(rows: Iterable[Row]) -> list[Job]:
    """Leaves out rows that cannot be read, so that the others still work."""
    found = []
    for row in rows:
        try:
            found.append(job_of(row))
        except (DecodeError, ValueError) as error:
            log.error("job %s cannot be read and is left out: %s", row["id"], error)
    return found


def attempt_of(row: Row) -> Attempt:
    return Attempt(
        number=row["number"],
        placement=placement_of(row["placement"]),
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outcome=row["outcome"],
        failure=decode(Failure, json.loads(row["failure"])) if row["failure"] else None,
        started_boot=row["started_boot"],
        ended_boot=row["ended_boot"],
    )


def job_of(row: Row) -> Job:
    return Job(
        id=row["id"],
        spec=spec_of(row["spec"]),
        user=row["user_name"],
        state=JobState(row["state"]),
        reason=row["reason"],
        submitted_at=row["submitted_at"],
        attempt=row["attempt"],
        placement=placement_of(row["placement"]) if row["placement"] else None,
        started_at=row["started_at"],
        attempt_started_at=row["attempt_started_at"],
        ended_at=row["ended_at"],
        exit_code=row["exit_code"],
        ending=Ending(row["ending"]) if row["ending"] else None,
        tries=_tries(row["tries"]),
        origin=decode(Origin, json.loads(row["origin"])) if row["origin"] else None,
        cached_from=row["cached_from"],
        results_removed_at=row["results_removed_at"],
        submitted_boot=row["submitted_boot"],
        started_boot=row["started_boot"],
        attempt_started_boot=row["attempt_started_boot"],
        ended_boot=row["ended_boot"],
        submit_key=row["submit_key"],
    )


def brief_of(spec: JobSpec, text: str) -> str | None:
    """Returns what lists show of a large spec: the beginning of its command and no variables. None: it is not large."""
    if len(text) <= _LARGE:
        return None
    nothing = JobSpec(spec.name, ())
    plain = {one.name: getattr(nothing, one.name) for one in fields(spec) if one.name not in ("name", "argv")}
    large = [name for name, value in plain.items() if len(dumps([getattr(spec, name)])) > _SHOWN]
    words: list[str] = []
    for word in spec.argv:
        left = _SHOWN - sum(map(len, words)) - len(words)
        words.append(word[:left])
        if len(word) >= left:
            break
    argv = (*words, "…") if tuple(words) != spec.argv else spec.argv
    return dumps(replace(spec, argv=argv, **{name: plain[name] for name in large}))


# Many jobs are alike, and frozen values can be shared. Only as many as one page shows are kept: jobs that have not
# ended are in memory anyway, and what the others were is not worth remembering.
_SHARED = 512


def spec_of(text: str) -> JobSpec:
    return _shared_spec(text) if len(text) <= _LARGE else decode(JobSpec, json.loads(text))


@lru_cache(maxsize=_SHARED)
def _shared_spec(text: str) -> JobSpec:
    return decode(JobSpec, json.loads(text))


@lru_cache(maxsize=_SHARED)
def placement_of(text: str) -> Placement:
    return decode(Placement, json.loads(text))


@lru_cache(maxsize=_SHARED)
def _tries(text: str) -> Tries:
    return decode(Tries, json.loads(text))


# --- which jobs a user may see ----------------------------------------------------------------------------------------
# Private jobs of others are left out.


VISIBLE = "(private = 0 OR user_name = ?)"  # with the user's name


class VisibilityStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, word: str, viewer: str, without: Collection[int] = ()) -> Job:
        """By name (the newest of that name), or ``last``, among the jobs that this user may see."""
        return await self._database.run(lambda db: _find(db, word, viewer, without))

    async def hidden_from(self, viewer: str | None) -> frozenset[int]:
        """The jobs that this user must not see; None sees all."""
        if viewer is None:
            return frozenset()
        query = "SELECT id FROM jobs WHERE private = 1 AND user_name <> ?"
        return await self._database.run(lambda db: frozenset(row["id"] for row in db.execute(query, (viewer,))))


def _find(db: Connection, word: str, viewer: str, without: Collection[int]) -> Job:
    where, values = VISIBLE, tuple[object, ...]((viewer,))
    if word != "last":
        where, values = f"{where} AND name = ?", (*values, word)
    if word != "last" and without:
        where, values = f"{where} AND id NOT IN ({','.join('?' * len(without))})", (*values, *without)
    row = db.execute(f"SELECT * FROM jobs WHERE {where} ORDER BY id DESC LIMIT 1", values).fetchone()
    if row is None:
        raise NotFound(f"there is no job {word!r}", hint="see: ugro status")
    return job_of(row)


# --- pages of jobs ----------------------------------------------------------------------------------------------------
# The newest come first. A page begins at an id, so later pages cost no more than the first.


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
