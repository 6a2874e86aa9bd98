"""Jobs on disk: everything that may be asked of them, and who hears of their changes.

``moves`` takes new jobs, and changes a job's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from ugro.features.safe_mode.rules import Ids
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs import moves as job_moves
from ugro.kernel.jobs import moves as smalllogs
from ugro.kernel.jobs import moves as submissions
from ugro.kernel.jobs import moves as usage
from ugro.kernel.jobs.model import FINAL_STATES, Attempt, Ending, Job, JobSpec, JobState, Placement
from ugro.kernel.jobs.moves import About, Changes, SmallLog, Submission
from ugro.kernel.jobs.records import Plan
from ugro.kernel.jobs.rows import (
    attempt_of,
    event_of,
    job_of,
    newest_event,
    note,
    placement_of,
    read_job,
    readable_jobs,
    spec_of,
)
from ugro.kernel.store import standing
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database, Work
from ugro.kernel.store.standing import StandingStore
from ugro.kernel.support import moments as clock
from ugro.kernel.support import quantities as quantity
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import NotAllowed, NotFound
from ugro.kernel.support.moments import elapsed_s, instant_of

# --- ended jobs -------------------------------------------------------------------------------------------------------
# They are read in the order in which they ended, for metrics and notifications.


_FINAL = sorted(FINAL_STATES)


@dataclass(frozen=True, slots=True)
class End:
    seq: int  # of its event
    at: str
    job: int
    attempt: int
    name: str
    state: JobState
    reason: str
    lasted_s: float | None  # None: it was never started
    has_notify: bool  # the job names channels to notify


class EndStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def newest(self) -> int:
        """The number of the newest event."""
        return await self._database.run(newest_event)

    async def after(self, seq: int, limit: int = 5000) -> list[End]:
        return await self._database.run(lambda db: _after(db, seq, limit))


def _after(db: Connection, seq: int, limit: int) -> list[End]:
    # The empty text keeps databases from using the index by kind: in the order of events they can stop at the limit.
    query = (
        "SELECT e.seq, e.at, e.job, e.attempt, j.name, e.kind, e.text, j.started_at, j.started_boot, "
        "j.ended_at, j.ended_boot, j.spec NOT LIKE '%\"notify\":[]%' AS has_notify "
        "FROM events e JOIN jobs j ON j.id = e.job "
        f"WHERE e.seq > ? AND e.kind || '' IN ({','.join('?' * len(_FINAL))}) ORDER BY e.seq LIMIT ?"
    )
    return [_end(row) for row in db.execute(query, (seq, *_FINAL, limit))]


def _end(row: Row) -> End:
    return End(
        row["seq"], row["at"], row["job"], row["attempt"], row["name"], JobState(row["kind"]), row["text"],
        _lasted_s(row), bool(row["has_notify"]),
    )  # fmt: skip


def _lasted_s(row: Row) -> float | None:
    if not row["started_at"] or not row["ended_at"]:
        return None
    started = instant_of(row["started_at"], row["started_boot"])
    return elapsed_s(started, instant_of(row["ended_at"], row["ended_boot"]))


# --- what was placed where --------------------------------------------------------------------------------------------
# What nodes report is compared with the placements of all attempts.


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


# --- jobs -------------------------------------------------------------------------------------------------------------


_MOST_WITHDRAWN = 10_000

Mark = tuple[str, int, str | None]  # a job's state, attempt and ending


class JobStore:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.standing = StandingStore(database, self.notify)
        self.usage = usage.UsageStore(database)
        self._on_change: Callable[[Job], None] = lambda job: None
        self._journal: Callable[[Job], None] = lambda job: None
        # Used by the database's thread only. Not on disk: a submission that is under way ends with this process.
        self._withdrawn: dict[str, None] = {}

    def listen(self, on_change: Callable[[Job], None]) -> None:
        """``on_change`` is called with every changed job once the change is durable, in the order of the changes."""
        self._on_change = on_change

    def keep_journal(self, note: Callable[[Job], None]) -> None:
        """``note`` is called as the listener is, and before it."""
        self._journal = note

    def notify(self, job: Job) -> None:
        self._journal(job)
        self._on_change(job)

    async def submit(self, spec: JobSpec, user: str, key: str, about: About | None = None) -> Submission:
        """Idempotent by ``key``: a client that got no answer may submit again."""
        return await self._database.run(
            lambda db: self._submit(db, spec, user, key, about or About()),
            then=lambda submission: self.notify(submission.job),
        )

    async def submitted(self, key: str) -> Job | None:
        """The job that was submitted with this key."""
        return await self._database.run(lambda db: submissions.submitted(db, key))

    async def submit_many(self, wanted: Iterable[tuple[JobSpec, str, str, About]]) -> list[Submission]:
        """Submits all of them or none."""

        def notify(done: list[Submission]) -> None:
            for submission in done:
                self.notify(submission.job)

        each = list(wanted)
        return await self._database.run(lambda db: [self._submit(db, *one) for one in each], then=notify)

    async def withdraw(self, key: str) -> Job | None:
        """Refuses a submission with this key that is not recorded yet; the job if it is recorded already."""

        def work(db: Connection) -> Job | None:
            if (known := submissions.submitted(db, key)) is None:
                self._withdrawn[key] = None
                for oldest in list(self._withdrawn)[:-_MOST_WITHDRAWN]:
                    del self._withdrawn[oldest]
            return known

        return await self._database.run(work)

    async def done_before(self, cache_key: str, user: str) -> Job | None:
        """The newest job that did the same work and still has its results; not one in another person's account."""
        return await self._database.run(lambda db: submissions.done_before(db, cache_key, user))

    async def start(self, job: Job, placement: Placement, reason: str) -> Job:
        """Records the job's devices and the number of its next attempt, before anything is started."""
        return await self._change(lambda db: job_moves.start(db, job, placement, reason))

    async def start_many(self, wanted: Iterable[tuple[Job, Placement, str]]) -> list[Job | Exception]:
        """Each alone. Returns the started job or the error, in the same order."""
        works = (partial(job_moves.start, job=job, placement=place, reason=reason) for job, place, reason in wanted)
        return await self._database.run_each(works, then=self.notify)

    async def move(self, job: Job, state: JobState, reason: str, **changes: Unpack[Changes]) -> Job:
        return await self._change(lambda db: job_moves.move(db, job, state, reason, changes))

    async def finish(self, job: Job, log: SmallLog) -> Job:
        """Records that it succeeded, with everything it wrote: its last two moves at once."""
        return await self._change(lambda db: job_moves.finish(db, job, log))

    async def small_log(self, job: int) -> tuple[SmallLog, str] | None:
        """The log of a job that ended this way, and when it ended."""
        return await self._database.run(lambda db: smalllogs.read(db, job))

    async def ask_to_end(self, job: int, ending: Ending) -> Job:
        """Records why a job is to end. The first reason is kept, except that a user's cancel overrides all but success.

        A job that holds no devices can only be cancelled.
        """
        return await self._change(lambda db: job_moves.ask_to_end(db, job, ending))

    async def plan(self, job: Job) -> Plan | None:
        """The processes of this attempt, recorded before any was started."""
        return await self.planned(job.id, job.attempt)

    async def planned(self, job: int, attempt: int) -> Plan | None:
        return await self._database.run(lambda db: _plan(db, job, attempt))

    async def record_plan(self, job: Job, plan: Plan) -> None:
        await self._database.run(
            lambda db: db.execute(
                "UPDATE attempts SET plan = ? WHERE job = ? AND number = ?", (dumps(plan), job.id, job.attempt)
            )
        )

    async def attempts(self, job: int) -> list[Attempt]:
        """All attempts of a job, the first one first."""
        query = "SELECT * FROM attempts WHERE job = ? ORDER BY number"
        return await self._database.run(lambda db: [attempt_of(row) for row in db.execute(query, (job,))])

    async def recorded(self, runs: Collection[Key]) -> RecordedRuns:
        """What was placed where, of these jobs and attempts."""
        return await self._database.run(lambda db: read(db, runs))

    async def note(self, kind: str, text: str, *, job: Job | None = None, node: str | None = None) -> None:
        await self._database.run(lambda db: note(db, kind, text, job, node))

    async def get(self, job: int) -> Job:
        return await self._database.run(lambda db: read_job(db, job))

    async def find(self, word: str, without: Collection[int] = ()) -> Job:
        """By id, by name (the newest of that name), or ``last``; by name only jobs that are not in ``without``."""
        return await self._database.run(lambda db: _find(db, word, without))

    async def in_states(self, states: Collection[JobState]) -> list[Job]:
        return await self._database.run(lambda db: _in_states(db, states))

    async def read_states(self, states: Collection[JobState], then: Callable[[list[Job]], None]) -> None:
        """As ``in_states``, but ``then`` is called in order with the changes that ``listen`` reports."""
        await self._database.run(lambda db: _in_states(db, states), then=then)

    async def read_marks(self, states: Collection[JobState], then: Callable[[dict[int, Mark]], None]) -> None:
        """Enough to see which jobs have changed, for a fraction of the cost of reading them."""
        await self._database.run(lambda db: _marks(db, states), then=then)

    async def read_jobs(self, numbers: Sequence[int], then: Callable[[list[Job]], None]) -> None:
        """Those of them that exist."""
        await self._database.run(lambda db: _some(db, numbers), then=then)

    async def newest(self, limit: int) -> list[Job]:
        query = "SELECT * FROM jobs ORDER BY id DESC LIMIT ?"
        return await self._database.run(lambda db: readable_jobs(db.execute(query, (limit,))))

    async def users(self) -> set[str]:
        """Everybody who ever submitted a job that is still there."""
        query = "SELECT DISTINCT user_name FROM jobs"
        return await self._database.run(lambda db: {row["user_name"] for row in db.execute(query)})

    async def to_keep(self) -> list[Job]:
        """Ended jobs whose checkpoints have not been collected yet."""
        query = "SELECT jobs.* FROM jobs JOIN to_keep ON to_keep.job = jobs.id ORDER BY jobs.id"
        return await self._database.run(lambda db: readable_jobs(db.execute(query)))

    async def is_to_keep(self, job: int) -> bool:
        query = "SELECT 1 FROM to_keep WHERE job = ?"
        return await self._database.run(lambda db: db.execute(query, (job,)).fetchone() is not None)

    async def kept(self, job: Job) -> None:
        await self._database.run(lambda db: db.execute("DELETE FROM to_keep WHERE job = ?", (job.id,)))

    async def note_results_removed(self, job: Job, reason: str = "removed by their user") -> Job:
        return await self._change(lambda db: _note_results_removed(db, job.id, reason))

    async def states_of(self, jobs: Sequence[int]) -> dict[int, JobState]:
        if not jobs:
            return {}
        marks = ",".join("?" * len(jobs))
        return await self._database.run(
            lambda db: {
                row["id"]: JobState(row["state"])
                for row in db.execute(f"SELECT id, state FROM jobs WHERE id IN ({marks})", list(jobs))
            }
        )

    async def events(self, *, after: int = 0, job: int | None = None, limit: int = 1000) -> list[Event]:
        clause, values = ("AND job = ?", [after, job, limit]) if job is not None else ("", [after, limit])
        query = f"SELECT * FROM events WHERE seq > ? {clause} ORDER BY seq LIMIT ?"
        return await self._database.run(lambda db: [event_of(row) for row in db.execute(query, values)])

    async def newest_events(self, limit: int, *, job: int | None = None) -> list[Event]:
        """The newest first."""
        clause, values = ("WHERE job = ?", [job, limit]) if job is not None else ("", [limit])
        query = f"SELECT * FROM events {clause} ORDER BY seq DESC LIMIT ?"
        return await self._database.run(lambda db: [event_of(row) for row in db.execute(query, values)])

    def _submit(self, db: Connection, spec: JobSpec, user: str, key: str, about: About) -> Submission:
        if key in self._withdrawn:
            raise NotAllowed("this submission was withdrawn", hint="submit it again with another key")
        submission = submissions.submit(db, spec, user, key, about)
        self.standing.keep_reserved(db, submission.job.id)
        return submission

    async def _change(self, work: Work[Job]) -> Job:
        return await self._database.run(work, then=self.notify)


def _in_states(db: Connection, states: Collection[JobState]) -> list[Job]:
    wanted = sorted(states)
    marks = ",".join("?" * len(wanted))
    return readable_jobs(db.execute(f"SELECT * FROM jobs WHERE state IN ({marks}) ORDER BY id", wanted))


def _marks(db: Connection, states: Collection[JobState]) -> dict[int, Mark]:
    wanted = sorted(states)
    query = f"SELECT id, state, attempt, ending FROM jobs WHERE state IN ({','.join('?' * len(wanted))})"
    return {number: (state, attempt, ending) for number, state, attempt, ending in db.execute(query, wanted)}


def _some(db: Connection, numbers: Sequence[int]) -> list[Job]:
    rows = (db.execute("SELECT * FROM jobs WHERE id = ?", (number,)).fetchone() for number in numbers)
    return readable_jobs(row for row in rows if row is not None)


def _note_results_removed(db: Connection, job: int, reason: str) -> Job:
    current = read_job(db, job)
    if current.results_removed_at is None:
        db.execute("UPDATE jobs SET results_removed_at = ? WHERE id = ?", (clock.now().at, job))
        note(db, "results", reason, current, None)
    return read_job(db, job)


def _plan(db: Connection, job: int, attempt: int) -> Plan | None:
    row = db.execute("SELECT plan FROM attempts WHERE job = ? AND number = ?", (job, attempt)).fetchone()
    return decode(Plan, json.loads(row["plan"])) if row is not None and row["plan"] else None


def _find(db: Connection, word: str, without: Collection[int]) -> Job:
    if quantity.is_number(word):
        return read_job(db, int(word))
    where, values = "", tuple[object, ...]()
    if word != "last":
        others = f"AND id NOT IN ({','.join('?' * len(without))})" if without else ""
        where, values = f"WHERE name = ? {others}", (word, *without)
    row = db.execute(f"SELECT * FROM jobs {where} ORDER BY id DESC LIMIT 1", values).fetchone()
    if row is None:
        raise NotFound(f"there is no job {word!r}", hint="see: ugro status")
    return job_of(row)
