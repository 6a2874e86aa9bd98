"""Rows of jobs and attempts as the types of ``core``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import lru_cache

from ugro.core.environment import Origin
from ugro.core.errors import NotFound
from ugro.core.failure import Failure
from ugro.core.job import Attempt, Ending, Job, JobSpec, JobState, Placement, Tries
from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.store.connection import Connection, Row

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
