"""Catches up with what happened after this state was saved. Not moves of jobs: the moves were made, and are lost.

Of an attempt without a ticket only the number is known: it gets no row among the attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ugro.features.safe_mode.rules import Cancel, Change, End, Recall, Settle, Take, Wait
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs import moves as logins
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Ending, Job, JobState, Placement
from ugro.kernel.jobs.moves import names_of
from ugro.kernel.jobs.rows import brief_of, job_of
from ugro.kernel.store.connection import Connection
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import dumps

_EXIT_CODES = {JobState.SUCCEEDED: 0, JobState.CANCELLED: 130, JobState.FAILED: 1}


def apply(db: Connection, changes: Iterable[Change]) -> list[Job]:
    """Those that give devices back come first: others hold them by now."""
    ordered = sorted(changes, key=lambda change: isinstance(change, Take | Recall))
    return [_get(db, number) for change in ordered for number in _apply(db, change)]


def note(db: Connection, kind: str, text: str, job: int | None = None, node: str | None = None) -> None:
    query = "INSERT INTO events (at, job, attempt, node, kind, text) VALUES (?, ?, NULL, ?, ?, ?)"
    db.execute(query, (clock.now().at, job, node, str(kind), text))


def _apply(db: Connection, change: Change) -> list[int]:
    """Returns the jobs that it changed."""
    match change:
        case Settle():
            return _settle(db, change)
        case Wait(job, attempt):
            return _wait(db, job, attempt)
        case Cancel(job):
            return _cancel(db, job)
        case Take(job, ending, nodes):
            return _take(db, job, ending, nodes)
        case Recall(job, nodes, then):
            return list(dict.fromkeys([*_take(db, job, None, nodes), *_apply(db, then)]))
        case End(job, runs):
            for node, attempt in runs:
                note(db, "forgotten", f"attempt {attempt} was ended: the state does not know it", job, node)
    return []


def _settle(db: Connection, change: Settle) -> list[int]:
    job = _get(db, change.job)
    if job.is_final:
        return []
    _release(db, job, change.reason)
    now = clock.now()
    db.execute(
        "UPDATE jobs SET state = ?, reason = ?, attempt = ?, exit_code = ?, ended_at = ?, ended_boot = ? WHERE id = ?",
        (change.state, change.reason, change.attempt, _EXIT_CODES[change.state], now.at, now.boot, job.id),
    )
    if change.attempt and job.spec.has_checkpoints:
        db.execute("INSERT INTO to_keep (job) VALUES (?) ON CONFLICT DO NOTHING", (job.id,))
    note(db, change.state, change.reason, job.id)
    return [job.id]


def _cancel(db: Connection, job: int) -> list[int]:
    db.execute("UPDATE jobs SET ending = ? WHERE id = ?", (Ending.CANCELLED, job))
    note(db, "asked", "to end: cancelled, as was asked after this state was saved", job)
    return [job]


def _wait(db: Connection, number: int, attempt: int) -> list[int]:
    job = _get(db, number)
    ran = "was started" if attempt > job.attempt else "ended"
    reason = f"attempt {attempt} {ran} after this state was saved, and nothing of it runs"
    _release(db, job, reason)
    state = JobState.RECOVERING if job.state in HOLDING_STATES else job.state
    db.execute(
        "UPDATE jobs SET state = ?, reason = ?, attempt = ?, ending = NULL WHERE id = ?",
        (state, reason, max(attempt, job.attempt), number),
    )
    note(db, state, reason, number)
    return [number]


def _take(db: Connection, job: Job, ending: Ending | None, nodes: Sequence[str]) -> list[int]:
    reason = "adopted: it was started after this state was saved"
    assert job.placement is not None
    known = db.execute("SELECT * FROM jobs WHERE id = ?", (job.id,)).fetchone()
    changed = [job.id]
    if known is None:
        changed += _insert(db, job)
    else:
        ending = Ending.CANCELLED if known["ending"] == Ending.CANCELLED else ending
        _release(db, job_of(known), "a newer attempt was started after this state was saved")
    _hold(db, job, job.placement)
    began = (job.started_at, job.started_boot, job.attempt_started_at, job.attempt_started_boot)
    db.execute(
        "UPDATE jobs SET state = ?, reason = ?, attempt = ?, placement = ?, ending = ?, tries = ?, started_at = ?, "
        "started_boot = ?, attempt_started_at = ?, attempt_started_boot = ? WHERE id = ?",
        (JobState.RUNNING, reason, job.attempt, dumps(job.placement), ending, dumps(job.tries), *began, job.id),
    )
    note(db, "adopted", f"attempt {job.attempt} runs or ran on {', '.join(nodes)}", job.id)
    return changed


def _hold(db: Connection, job: Job, placement: Placement) -> None:
    db.execute(
        "INSERT INTO attempts (job, number, placement, started_at, started_boot) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (job, number) DO UPDATE SET placement = excluded.placement, started_at = excluded.started_at, "
        "started_boot = excluded.started_boot, ended_at = NULL, ended_boot = NULL, outcome = NULL, plan = NULL, "
        "failure = NULL",
        (job.id, job.attempt, dumps(placement), job.attempt_started_at or clock.now().at, job.attempt_started_boot),
    )
    for share in placement.shares:
        logins.remember(db, share)
        for device in names_of(job, share):
            # A device that this state gave to another job: the node itself lets only one of them have it.
            query = "INSERT INTO held_devices (node, device, job, attempt) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            db.execute(query, (node_of(share.node), device, job.id, job.attempt))


def _insert(db: Connection, job: Job) -> list[int]:
    """Returns jobs that changed besides it."""
    twin = db.execute("SELECT * FROM jobs WHERE submit_key = ?", (job.submit_key,)).fetchone()
    if twin is not None:
        db.execute("UPDATE jobs SET submit_key = ? WHERE id = ?", (f"twin of {job.id}: {job.submit_key}", twin["id"]))
    origin = dumps(job.origin) if job.origin else None
    submitted, spec = (job.submitted_at, job.submitted_boot, origin), dumps(job.spec)
    more = int(job.spec.private), brief_of(job.spec, spec)
    db.execute(
        "INSERT INTO jobs (id, submit_key, name, user_name, spec, state, reason, submitted_at, submitted_boot, origin, "
        "private, brief) VALUES (?, ?, ?, ?, ?, ?, '', ?, ?, ?, ?, ?)",
        (job.id, job.submit_key, job.spec.name, job.user, spec, JobState.RUNNING, *submitted, *more),
    )
    db.raise_ids("jobs", job.id)
    if twin is None or twin["attempt"] or JobState(twin["state"]) in FINAL_STATES:
        return []
    text = f"the same submission as job {job.id}, which was started before"
    return _settle(db, Settle(int(twin["id"]), 0, JobState.CANCELLED, text))


def _release(db: Connection, job: Job, outcome: str) -> None:
    now = clock.now()
    db.execute("DELETE FROM held_devices WHERE job = ?", (job.id,))
    db.execute(
        "UPDATE attempts SET ended_at = ?, ended_boot = ?, outcome = ? "
        "WHERE job = ? AND number = ? AND ended_at IS NULL",
        (now.at, now.boot, outcome, job.id, job.attempt),
    )


def _get(db: Connection, number: int) -> Job:
    return job_of(db.execute("SELECT * FROM jobs WHERE id = ?", (number,)).fetchone())
