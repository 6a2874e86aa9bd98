"""What was placed where, in any attempt: what nodes report is compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ugro.core.job import JobSpec, Placement
from ugro.core.support.codec import DecodeError
from ugro.policy.lifecycle.newer_state import Ids
from ugro.store import standing
from ugro.store.connection import Connection, Row
from ugro.store.job_rows import placement_of, spec_of

Key = tuple[int, int]  # job and attempt


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A job that we have; ``placement``: of the attempt that was asked for, None if there was none.

    Both are None if the job cannot be read: it is not one that was removed, and nothing more is known of it.
    """

    spec: JobSpec | None = None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class RecordedRuns:
    ids: Ids
    runs: dict[Key, RecordedRun]  # without those of jobs that we do not have

    @property
    def newest_job(self) -> int:
        """The highest number that a job was ever given."""
        return self.ids.highest


def read(db: Connection, keys: Iterable[Key]) -> RecordedRuns:
    query = (
        "SELECT j.spec, a.placement FROM jobs j LEFT JOIN attempts a ON a.job = j.id AND a.number = ? WHERE j.id = ?"
    )
    found = {}
    for job, attempt in keys:
        row = db.execute(query, (attempt, job)).fetchone()
        if row is not None:
            found[job, attempt] = _recorded(row)
    return RecordedRuns(standing.numbers(db).ids, found)


def _recorded(row: Row) -> RecordedRun:
    try:
        return RecordedRun(spec_of(row["spec"]), placement_of(row["placement"]) if row["placement"] else None)
    except (DecodeError, ValueError):
        return RecordedRun()
