"""How a job comes in: once for each key, with what is known about it besides its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ugro.core.environment import Origin
from ugro.core.errors import NotFound
from ugro.core.job import Job, JobSpec, JobState
from ugro.core.support import clock
from ugro.core.support.codec import dumps
from ugro.store.connection import Connection
from ugro.store.events import note
from ugro.store.job_moves import move
from ugro.store.job_rows import brief_of, job_of


@dataclass(frozen=True, slots=True)
class Submission:
    job: Job
    is_new: bool  # False: it was submitted before, and the answer was lost


@dataclass(frozen=True, slots=True)
class About:
    """What is known about a submitted job besides its spec."""

    origin: Origin | None = None
    cache_key: str | None = None  # the same key means the same work
    cached_from: int | None = None  # an earlier job that did the same work, if that still holds
    notes: tuple[str, ...] = ()


def submit(db: Connection, spec: JobSpec, user: str, key: str, about: About) -> Submission:
    if (known := submitted(db, key)) is not None:
        return Submission(known, is_new=False)
    _check_exist(db, (*spec.after.ok, *spec.after.any))
    now, state, reason, origin = clock.now(), JobState.QUEUED, "submitted", about.origin
    text = dumps(spec)
    more = (_text(origin), about.cache_key, int(spec.private), brief_of(spec, text))
    row = db.execute(
        "INSERT INTO jobs (submit_key, name, user_name, spec, state, reason, submitted_at, submitted_boot, origin, "
        "cache_key, private, brief) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
        (key, spec.name, user, text, state, reason, now.at, now.boot, *more),
    ).fetchone()
    job = Job(row["id"], spec, user, state, reason, now.at, origin=origin, submitted_boot=now.boot, submit_key=key)
    note(db, JobState.QUEUED, f"submitted by {user}", job, None)
    for line in about.notes:
        note(db, "cache", line, job, None)
    if about.cache_key is not None and about.cached_from is not None:
        job = _point_to(db, job, about.cache_key, about.cached_from)
    return Submission(job, is_new=True)


def _check_exist(db: Connection, numbers: Sequence[int]) -> None:
    """A job that runs after one that was removed a moment ago would wait forever."""
    for number in numbers:
        if db.execute("SELECT 1 FROM jobs WHERE id = ?", (number,)).fetchone() is None:
            raise NotFound(f"there is no job {number} to run after", hint="see: ugro status")


def submitted(db: Connection, key: str) -> Job | None:
    row = db.execute("SELECT * FROM jobs WHERE submit_key = ?", (key,)).fetchone()
    return job_of(row) if row is not None else None


def _point_to(db: Connection, job: Job, cache_key: str, first: int) -> Job:
    """Ends the job at once, if the earlier job still has its results."""
    known = done_before(db, cache_key, job.user)
    if known is None or known.id != first:
        note(db, "cache", f"job {first} can no longer be reused; the job is run", job, None)
        return job
    db.execute("UPDATE jobs SET cached_from = ? WHERE id = ?", (first, job.id))
    job = replace(job, cached_from=first)
    return move(db, job, JobState.SUCCEEDED, f"cached from job {first}", {"exit_code": 0})


def done_before(db: Connection, cache_key: str, user: str) -> Job | None:
    query = (
        "SELECT * FROM jobs WHERE cache_key = ? AND state = ? AND cached_from IS NULL AND results_removed_at IS NULL "
        "AND private = 0 ORDER BY id DESC LIMIT 100"
    )
    found = (job_of(row) for row in db.execute(query, (cache_key, JobState.SUCCEEDED)).fetchall())
    return next((job for job in found if not job.is_apart_from(user)), None)


def _text(origin: Origin | None) -> str | None:
    return dumps(origin) if origin is not None else None
