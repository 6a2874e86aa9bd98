"""A job's moves from state to state: one transaction each, with its event, checked against the table of legal moves.

A move names its attempt, so a report about an older attempt changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from ugro.core.errors import NotFound, UgroError
from ugro.core.failure import Failure
from ugro.core.job import FINAL_STATES, HOLDING_STATES, Ending, Job, JobState, Placement, Tries, check_move
from ugro.core.support import clock
from ugro.core.support.codec import dumps
from ugro.store import devices, smalllogs, usage
from ugro.store.connection import Connection
from ugro.store.events import note
from ugro.store.job_rows import read_job
from ugro.store.smalllogs import SmallLog


class StaleMove(UgroError):
    """A decision is out of date: the job has moved on, perhaps to another attempt, or its node takes no work now."""

    kind = "stale"


class Changes(TypedDict, total=False):
    """Fields that may change together with a job's state."""

    exit_code: int | None
    ending: Ending | None
    tries: Tries
    failure: Failure  # of the attempt that ends with this move


def start(db: Connection, job: Job, placement: Placement, reason: str) -> Job:
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
    note(db, JobState.STARTING, reason, started, None)
    return started


def _check_takes_work(db: Connection, job: Job, placement: Placement) -> None:
    """Raises StaleMove if a node was drained after the scheduler chose it."""
    drained = {row["name"] for row in db.execute("SELECT name FROM drained_nodes")}
    for node in placement.node_names:
        if node in drained:
            raise StaleMove(f"{node} was drained before job {job.id} could start there")


def move(db: Connection, job: Job, state: JobState, reason: str, changes: Changes) -> Job:
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
    note(db, state, reason, moved, None)
    return moved


def finish(db: Connection, job: Job, log: SmallLog) -> Job:
    """Two moves in one transaction, so nobody sees the first alone."""
    reason = "every rank ended with 0"
    current = _current(db, job)
    check_move(current.state, JobState.STOPPING)
    stopping = replace(current, state=JobState.STOPPING, ending=Ending.DONE)
    note(db, JobState.STOPPING, reason, stopping, None)
    smalllogs.put(db, log)
    return _moved(db, stopping, JobState.SUCCEEDED, reason, {"exit_code": 0})


def ask_to_end(db: Connection, job: int, ending: Ending) -> Job:
    current = read_job(db, job)
    may_end = not current.is_final if ending is Ending.CANCELLED else current.state in HOLDING_STATES
    is_outranked = current.ending not in (Ending.DONE, Ending.CANCELLED)
    if may_end and (current.ending is None or (ending is Ending.CANCELLED and is_outranked)):
        db.execute("UPDATE jobs SET ending = ? WHERE id = ?", (ending, job))
        note(db, "asked", f"to end: {ending.value.replace('_', ' ')}", current, None)
    return read_job(db, job)


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
