"""Jobs on disk. A move to another state is one transaction with its event, checked against the table of legal moves.

A move names its attempt, so a report about an older attempt changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, Unpack

from ugro.core.environment import Origin
from ugro.core.errors import NotAllowed, NotFound, UgroError
from ugro.core.event import Event
from ugro.core.failure import Failure
from ugro.core.job import (
    FINAL_STATES,
    HOLDING_STATES,
    Attempt,
    Ending,
    Job,
    JobSpec,
    JobState,
    Placement,
    Tries,
    check_move,
)
from ugro.core.plan import Plan
from ugro.core.support import clock, quantity
from ugro.core.support.codec import decode, dumps
from ugro.store import devices, placements, smalllogs, usage
from ugro.store.connection import Connection
from ugro.store.engine import Database, Work
from ugro.store.events import event_of
from ugro.store.job_rows import attempt_of, job_of, readable_jobs
from ugro.store.placements import Key, RecordedRuns
from ugro.store.smalllogs import SmallLog
from ugro.store.standing import StandingStore

_LARGEST_ID = 2**63 - 1
_MOST_WITHDRAWN = 10_000


class StaleMove(UgroError):
    """A decision is out of date: the job has moved on, perhaps to another attempt, or its node takes no work now."""

    kind = "stale"


class Changes(TypedDict, total=False):
    """Fields that may change together with a job's state."""

    exit_code: int | None
    ending: Ending | None
    tries: Tries
    failure: Failure  # of the attempt that ends with this move


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


_NOTHING = About()
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
            lambda db: self._submit(db, spec, user, key, about or _NOTHING),
            then=lambda submission: self.notify(submission.job),
        )

    async def submitted(self, key: str) -> Job | None:
        """The job that was submitted with this key."""
        return await self._database.run(lambda db: _submitted(db, key))

    async def submit_many(self, wanted: Iterable[tuple[JobSpec, str, str, About]]) -> list[Submission]:
        """Submits all of them or none."""

        def notify(submissions: list[Submission]) -> None:
            for submission in submissions:
                self.notify(submission.job)

        each = list(wanted)
        return await self._database.run(lambda db: [self._submit(db, *one) for one in each], then=notify)

    async def withdraw(self, key: str) -> Job | None:
        """Refuses a submission with this key that is not recorded yet; the job if it is recorded already."""

        def work(db: Connection) -> Job | None:
            if (known := _submitted(db, key)) is None:
                self._withdrawn[key] = None
                for oldest in list(self._withdrawn)[:-_MOST_WITHDRAWN]:
                    del self._withdrawn[oldest]
            return known

        return await self._database.run(work)

    async def done_before(self, cache_key: str, user: str) -> Job | None:
        """The newest job that did the same work and still has its results; not one in another person's account."""
        return await self._database.run(lambda db: _done_before(db, cache_key, user))

    async def start(self, job: Job, placement: Placement, reason: str) -> Job:
        """Records the job's devices and the number of its next attempt, before anything is started."""
        return await self._change(lambda db: _start(db, job, placement, reason))

    async def start_many(self, wanted: Iterable[tuple[Job, Placement, str]]) -> list[Job | Exception]:
        """Each alone. Returns the started job or the error, in the same order."""
        works = (partial(_start, job=job, placement=placement, reason=reason) for job, placement, reason in wanted)
        return await self._database.run_each(works, then=self.notify)

    async def move(self, job: Job, state: JobState, reason: str, **changes: Unpack[Changes]) -> Job:
        return await self._change(lambda db: _move(db, job, state, reason, changes))

    async def finish(self, job: Job, log: SmallLog) -> Job:
        """Records that it succeeded, with everything it wrote: its last two moves at once."""
        return await self._change(lambda db: _finish(db, job, log))

    async def small_log(self, job: int) -> tuple[SmallLog, str] | None:
        """The log of a job that ended this way, and when it ended."""
        return await self._database.run(lambda db: smalllogs.read(db, job))

    async def ask_to_end(self, job: int, ending: Ending) -> Job:
        """Records why a job is to end. The first reason is kept, except that a user's cancel overrides all but success.

        A job that holds no devices can only be cancelled.
        """
        return await self._change(lambda db: _ask_to_end(db, job, ending))

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
        return await self._database.run(lambda db: placements.read(db, runs))

    async def note(self, kind: str, text: str, *, job: Job | None = None, node: str | None = None) -> None:
        await self._database.run(lambda db: _note(db, kind, text, job, node))

    async def get(self, job: int) -> Job:
        return await self._database.run(lambda db: _get(db, job))

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
        submission = _submit(db, spec, user, key, about)
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


def _submit(db: Connection, spec: JobSpec, user: str, key: str, about: About) -> Submission:
    if (known := _submitted(db, key)) is not None:
        return Submission(known, is_new=False)
    _check_exist(db, (*spec.after.ok, *spec.after.any))
    now, state, reason, origin = clock.now(), JobState.QUEUED, "submitted", about.origin
    more = (_text(origin), about.cache_key, int(spec.private))
    row = db.execute(
        "INSERT INTO jobs (submit_key, name, user_name, spec, state, reason, submitted_at, submitted_boot, origin, "
        "cache_key, private) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
        (key, spec.name, user, dumps(spec), state, reason, now.at, now.boot, *more),
    ).fetchone()
    job = Job(row["id"], spec, user, state, reason, now.at, origin=origin, submitted_boot=now.boot, submit_key=key)
    _note(db, JobState.QUEUED, f"submitted by {user}", job, None)
    for note in about.notes:
        _note(db, "cache", note, job, None)
    if about.cache_key is not None and about.cached_from is not None:
        job = _point_to(db, job, about.cache_key, about.cached_from)
    return Submission(job, is_new=True)


def _check_exist(db: Connection, numbers: Sequence[int]) -> None:
    """A job that runs after one that was removed a moment ago would wait forever."""
    for number in numbers:
        if db.execute("SELECT 1 FROM jobs WHERE id = ?", (number,)).fetchone() is None:
            raise NotFound(f"there is no job {number} to run after", hint="see: ugro status")


def _submitted(db: Connection, key: str) -> Job | None:
    row = db.execute("SELECT * FROM jobs WHERE submit_key = ?", (key,)).fetchone()
    return job_of(row) if row is not None else None


def _point_to(db: Connection, job: Job, cache_key: str, first: int) -> Job:
    """Ends the job at once, if the earlier job still has its results."""
    known = _done_before(db, cache_key, job.user)
    if known is None or known.id != first:
        _note(db, "cache", f"job {first} can no longer be reused; the job is run", job, None)
        return job
    db.execute("UPDATE jobs SET cached_from = ? WHERE id = ?", (first, job.id))
    job = replace(job, cached_from=first)
    return _move(db, job, JobState.SUCCEEDED, f"cached from job {first}", {"exit_code": 0})


def _done_before(db: Connection, cache_key: str, user: str) -> Job | None:
    query = (
        "SELECT * FROM jobs WHERE cache_key = ? AND state = ? AND cached_from IS NULL AND results_removed_at IS NULL "
        "AND private = 0 ORDER BY id DESC LIMIT 100"
    )
    found = (job_of(row) for row in db.execute(query, (cache_key, JobState.SUCCEEDED)).fetchall())
    return next((job for job in found if not job.is_apart_from(user)), None)


def _text(origin: Origin | None) -> str | None:
    return dumps(origin) if origin is not None else None


def _start(db: Connection, job: Job, placement: Placement, reason: str) -> Job:
    current = _current(db, job)
    check_move(current.state, JobState.STARTING)
    if current.ending is not None:
        raise StaleMove(f"job {job.id} was asked to end before it could start")
    _check_takes_work(db, job, placement)
    attempt = current.attempt + 1
    for share in placement.shares:
        if (problem := devices.hold(db, job, share, attempt)) is not None:
            raise StaleMove(problem)
    at, boot = (now := clock.now()).at, now.boot
    first = (at, boot) if current.started_at is None else (current.started_at, current.started_boot)
    text = dumps(placement)
    db.execute(
        "INSERT INTO attempts (job, number, placement, started_at, started_boot) VALUES (?, ?, ?, ?, ?)",
        (job.id, attempt, text, at, boot),
    )
    db.execute(
        "UPDATE jobs SET state = ?, reason = ?, attempt = ?, placement = ?, attempt_started_at = ?, "
        "attempt_started_boot = ?, started_at = ?, started_boot = ? WHERE id = ?",
        (JobState.STARTING, reason, attempt, text, at, boot, *first, job.id),
    )
    started = replace(
        current,
        state=JobState.STARTING,
        reason=reason,
        attempt=attempt,
        placement=placement,
        started_at=first[0],
        started_boot=first[1],
        attempt_started_at=at,
        attempt_started_boot=boot,
    )
    _note(db, JobState.STARTING, reason, started, None)
    return started


def _check_takes_work(db: Connection, job: Job, placement: Placement) -> None:
    """Raises StaleMove if a node was drained after the scheduler chose it."""
    drained = {row["name"] for row in db.execute("SELECT name FROM drained_nodes")}
    for node in placement.node_names:
        if node in drained:
            raise StaleMove(f"{node} was drained before job {job.id} could start there")


def _move(db: Connection, job: Job, state: JobState, reason: str, changes: Changes) -> Job:
    return _moved(db, _current(db, job), state, reason, changes)


def _moved(db: Connection, current: Job, state: JobState, reason: str, changes: Changes) -> Job:
    check_move(current.state, state)
    end = clock.now() if state in FINAL_STATES else None
    moved = replace(
        current,
        state=state,
        reason=reason,
        exit_code=changes.get("exit_code"),
        ended_at=end.at if end else None,
        ended_boot=end.boot if end else None,
        ending=changes.get("ending", current.ending),
        tries=changes.get("tries", current.tries),
    )
    how = (moved.exit_code, moved.ended_at, moved.ended_boot, moved.ending, dumps(moved.tries))
    db.execute(
        "UPDATE jobs SET state = ?, reason = ?, exit_code = ?, ended_at = ?, ended_boot = ?, ending = ?, tries = ? "
        "WHERE id = ?",
        (state, reason, *how, current.id),
    )
    if state in FINAL_STATES and current.attempt and current.spec.has_checkpoints:
        db.execute("INSERT INTO to_keep (job) VALUES (?)", (current.id,))
    if current.state in HOLDING_STATES and state not in HOLDING_STATES:
        _release(db, current, reason, changes.get("failure"))
    _note(db, state, reason, moved, None)
    return moved


def _finish(db: Connection, job: Job, log: SmallLog) -> Job:
    """Two moves in one transaction, so nobody sees the first alone."""
    reason = "every rank ended with 0"
    current = _current(db, job)
    check_move(current.state, JobState.STOPPING)
    stopping = replace(current, state=JobState.STOPPING, ending=Ending.DONE)
    _note(db, JobState.STOPPING, reason, stopping, None)
    smalllogs.put(db, log)
    return _moved(db, stopping, JobState.SUCCEEDED, reason, {"exit_code": 0})


def _ask_to_end(db: Connection, job: int, ending: Ending) -> Job:
    current = _get(db, job)
    may_end = not current.is_final if ending is Ending.CANCELLED else current.state in HOLDING_STATES
    is_outranked = current.ending not in (Ending.DONE, Ending.CANCELLED)
    if may_end and (current.ending is None or (ending is Ending.CANCELLED and is_outranked)):
        db.execute("UPDATE jobs SET ending = ? WHERE id = ?", (ending, job))
        _note(db, "asked", f"to end: {ending.value.replace('_', ' ')}", current, None)
    return _get(db, job)


def _note_results_removed(db: Connection, job: int, reason: str) -> Job:
    current = _get(db, job)
    if current.results_removed_at is None:
        db.execute("UPDATE jobs SET results_removed_at = ? WHERE id = ?", (clock.now().at, job))
        _note(db, "results", reason, current, None)
    return _get(db, job)


def _plan(db: Connection, job: int, attempt: int) -> Plan | None:
    row = db.execute("SELECT plan FROM attempts WHERE job = ? AND number = ?", (job, attempt)).fetchone()
    return decode(Plan, json.loads(row["plan"])) if row is not None and row["plan"] else None


def _release(db: Connection, job: Job, outcome: str, failure: Failure | None) -> None:
    now = clock.now()
    db.execute("DELETE FROM held_devices WHERE job = ?", (job.id,))
    usage.charge(db, job, now)
    db.execute(
        "UPDATE attempts SET ended_at = ?, ended_boot = ?, outcome = ?, failure = ? WHERE job = ? AND number = ?",
        (now.at, now.boot, outcome, dumps(failure) if failure else None, job.id, job.attempt),
    )


def _current(db: Connection, seen: Job) -> Job:
    """The job, if it has not changed since it was seen; raises StaleMove otherwise.

    Nothing else of a job changes unless one of these three does.
    """
    row = db.execute("SELECT state, attempt, ending FROM jobs WHERE id = ?", (seen.id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no job {seen.id}", hint="see: ugro status")
    state, attempt, ending = row
    if (state, attempt) != (seen.state, seen.attempt):
        raise StaleMove(f"job {seen.id} is {state} in attempt {attempt}, not {seen.state} in {seen.attempt}")
    if ending != seen.ending:
        raise StaleMove(f"job {seen.id} is to end: {ending}")
    return seen


def _note(db: Connection, kind: str, text: str, job: Job | None, node: str | None) -> None:
    db.execute(
        "INSERT INTO events (at, job, attempt, node, kind, text) VALUES (?, ?, ?, ?, ?, ?)",
        (clock.now().at, job.id if job else None, job.attempt if job else None, node, str(kind), text),
    )


def _get(db: Connection, job: int) -> Job:
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone() if job <= _LARGEST_ID else None
    if row is None:
        raise NotFound(f"there is no job {job}", hint="see: ugro status")
    return job_of(row)


def _find(db: Connection, word: str, without: Collection[int]) -> Job:
    if quantity.is_number(word):
        return _get(db, int(word))
    where, values = "", tuple[object, ...]()
    if word != "last":
        others = f"AND id NOT IN ({','.join('?' * len(without))})" if without else ""
        where, values = f"WHERE name = ? {others}", (word, *without)
    row = db.execute(f"SELECT * FROM jobs {where} ORDER BY id DESC LIMIT 1", values).fetchone()
    if row is None:
        raise NotFound(f"there is no job {word!r}", hint="see: ugro status")
    return job_of(row)
