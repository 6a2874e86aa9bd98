"""A job's moves from state to state: one transaction each, with its event, checked against the table of legal moves.

A move names its attempt, so a report about an older attempt changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from ugro.features.quotas.model import HOUR_S
from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.jobs.model import (
    FINAL_STATES,
    HOLDING_STATES,
    Ending,
    Failure,
    Job,
    JobSpec,
    JobState,
    Origin,
    Placement,
    Share,
    Tries,
    check_move,
)
from ugro.kernel.jobs.records import Held, attempt_hours, gpu_part
from ugro.kernel.jobs.rows import brief_of, job_of, note, read_job
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.kernel.support.moments import Instant, unix_seconds

# --- logins that jobs were started through ----------------------------------------------------------------------------
# They are written with the start, in the same transaction.


class LoginStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, bool]:
        """By name, whether it is clear: nothing of a job can be there."""
        query = "SELECT name, is_clear FROM logins"
        return await self._database.run(lambda db: {row["name"]: bool(row["is_clear"]) for row in db.execute(query)})

    async def clear(self, name: str) -> None:
        """It has nothing, and is closed. Not if a job was started there meanwhile."""
        await self._database.run(lambda db: _clear(db, name))


def remember(db: Connection, share: Share) -> None:
    if account_of(share.node):
        query = "INSERT INTO logins (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET is_clear = 0"
        db.execute(query, (share.node,))


def _clear(db: Connection, name: str) -> None:
    states = ", ".join(f"'{state}'" for state in sorted(HOLDING_STATES))
    query = (
        "UPDATE logins SET is_clear = 1 WHERE name = ? AND NOT EXISTS (SELECT 1 FROM attempts JOIN jobs "
        f"ON jobs.id = attempts.job AND jobs.attempt = attempts.number WHERE jobs.state IN ({states}) "
        "AND attempts.placement LIKE ? ESCAPE '!')"
    )
    pattern = "".join(f"!{letter}" if letter in "!_%" else letter for letter in dumps(name))
    db.execute(query, (name, f"%{pattern}%"))


# --- who holds which device -------------------------------------------------------------------------------------------
# The database itself refuses a second holder, unless a group shares the GPU.


def names_of(job: Job, share: Share) -> list[str]:
    """Without GPUs the job itself is the device, so that every job on a node is shown."""
    if share.gpu_group:
        return [f"gpu:{index}/{share.gpu_group}/{job.id}" for index in share.gpus]
    return [f"gpu:{index}" for index in share.gpus] or [f"job:{job.id}"]


def hold(db: Connection, job: Job, share: Share, attempt: int) -> str | None:
    """Why not, if others have one of the GPUs."""
    for index in share.gpus:
        if not _is_open(db, share, index, job):
            return f"GPU {index} of {node_of(share.node)} is held by others"
    remember(db, share)
    for device in names_of(job, share):
        query = "INSERT INTO held_devices (node, device, job, attempt) VALUES (?, ?, ?, ?)"
        db.execute(query, (node_of(share.node), device, job.id, attempt))
    return None


def _is_open(db: Connection, share: Share, index: int, job: Job) -> bool:
    """Those that share a GPU are rows of their own; nobody else may be beside them."""
    query = "SELECT device FROM held_devices WHERE node = ? AND (device = ? OR substr(device, 1, ?) = ?)"
    own, shares = f"gpu:{index}", f"gpu:{index}/"
    held = [str(row["device"]) for row in db.execute(query, (node_of(share.node), own, len(shares), shares))]
    if not share.gpu_group:
        strangers = [device for device in held if device != own]  # the primary key refuses the same name
    else:
        strangers = [device for device in held if not device.startswith(f"{shares}{share.gpu_group}/")]
    sharing = job.spec.resources.sharing
    return not strangers and (sharing is None or len(held) < sharing.most)


# --- logs of small commands -------------------------------------------------------------------------------------------
# They are recorded together with the end of their job.


@dataclass(frozen=True, slots=True)
class SmallLog:
    """Everything the ranks of a job's last attempt wrote."""

    job: int
    attempt: int
    ranks: tuple[tuple[int, bytes], ...]


def put(db: Connection, log: SmallLog) -> None:
    db.executemany(
        "INSERT INTO small_logs (job, attempt, rank, content) VALUES (?, ?, ?, ?)",
        [(log.job, log.attempt, rank, content) for rank, content in log.ranks],
    )


def read(db: Connection, job: int) -> tuple[SmallLog, str] | None:
    """With the time at which the job ended."""
    query = (
        "SELECT l.attempt, l.rank, l.content, j.ended_at FROM small_logs l JOIN jobs j ON j.id = l.job "
        "WHERE l.job = ? ORDER BY l.rank"
    )
    rows = db.execute(query, (job,)).fetchall()
    if not rows:
        return None
    log = SmallLog(job, rows[0]["attempt"], tuple((row["rank"], row["content"]) for row in rows))
    return log, str(rows[0]["ended_at"])


# --- the book of device time ------------------------------------------------------------------------------------------
# It says what users have used, by hour. It is written as an attempt ends, and stays when its job is removed.


_ADD = (
    "INSERT INTO usage_hours (user_name, hour, gpu_s, cpu_s, device_s, jobs, joules, changed) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, (SELECT COALESCE(MAX(changed), 0) + 1 FROM usage_hours)) "
    "ON CONFLICT (user_name, hour) DO UPDATE SET gpu_s = usage_hours.gpu_s + excluded.gpu_s, "
    "cpu_s = usage_hours.cpu_s + excluded.cpu_s, device_s = usage_hours.device_s + excluded.device_s, "
    "jobs = usage_hours.jobs + excluded.jobs, joules = usage_hours.joules + excluded.joules, "
    "changed = excluded.changed"
)
_KNOWN = (
    "INSERT INTO job_energy (job, joules) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET joules = excluded.joules"
)


@dataclass(frozen=True, slots=True)
class UserHour:
    user: str
    hour: int  # since the epoch
    gpu_s: float
    device_s: float
    changed: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Of ended attempts."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    jobs: int = 0
    joules: float = 0.0


class UsageStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def newer(self, changed: int, since_hour: int) -> list[UserHour]:
        """The hours that have changed since, the last change last."""
        query = (
            "SELECT user_name, hour, gpu_s, device_s, changed FROM usage_hours "
            "WHERE changed > ? AND hour >= ? ORDER BY changed"
        )
        return await self._database.run(
            lambda db: [UserHour(*row) for row in db.execute(query, (changed, since_hour))]
        )

    async def totals(self, since_hour: int = 0) -> dict[str, Totals]:
        """By user."""
        query = (
            "SELECT user_name, SUM(gpu_s), SUM(cpu_s), CAST(SUM(jobs) AS BIGINT), SUM(joules) FROM usage_hours "
            "WHERE hour >= ? GROUP BY user_name"
        )
        return await self._database.run(
            lambda db: {str(row[0]): Totals(*row[1:]) for row in db.execute(query, (since_hour,))}
        )

    async def note_energy(self, joules: Mapping[int, float]) -> None:
        """What jobs have used in all their attempts so far: what is new of it counts for their users."""
        await self._database.run(lambda db: _note_energy(db, joules.items()), counts=False)


def charge(db: Connection, job: Job, ended: Instant) -> None:
    """In the transaction in which an attempt ends: what it held counts for its user."""
    if job.placement is None:
        return
    held = Held.of(job.placement, gpu_part(job.spec.resources))
    parts = [
        (part.hour, held.gpus * part.seconds, held.cpus * part.seconds, held.devices * part.seconds)
        for part in attempt_hours(job, ended)
    ] or [(int(ended.wall_s // HOUR_S), 0.0, 0.0, 0.0)]
    for number, part in enumerate(parts):
        is_new = number == 0 and job.attempt == 1  # a job counts once, where it began
        db.execute(_ADD, (job.user, *part, int(is_new), 0.0))


def _note_energy(db: Connection, joules: Iterable[tuple[int, float]]) -> None:
    query = (
        "SELECT j.user_name, j.ended_at, COALESCE(e.joules, 0.0) FROM jobs j "
        "LEFT JOIN job_energy e ON e.job = j.id WHERE j.id = ?"
    )
    now_hour = int(clock.now().wall_s // HOUR_S)
    for job, total in joules:
        row = db.execute(query, (job,)).fetchone()
        if row is None or total <= row[2]:
            continue  # removed, or known
        hour = min(now_hour, int(unix_seconds(row[1]) // HOUR_S)) if row[1] else now_hour
        db.execute(_ADD, (row[0], hour, 0.0, 0.0, 0.0, 0, total - row[2]))
        db.execute(_KNOWN, (job, total))


# --- moves ------------------------------------------------------------------------------------------------------------


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
        if (problem := hold(db, job, share, attempt)) is not None:
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
    put(db, log)
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
    charge(db, job, now)
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


# --- submissions ------------------------------------------------------------------------------------------------------
# A job comes in once for each key, with what is known about it besides its spec.


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
