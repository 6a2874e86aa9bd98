"""What users have used, by hour. It is written as an attempt ends, and stays when its job is removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ugro.core.job import Job
from ugro.core.quota import HOUR_S
from ugro.core.support import clock
from ugro.core.support.moment import Instant, unix_seconds
from ugro.core.usage import Held, attempt_hours, gpu_part
from ugro.store.connection import Connection
from ugro.store.engine import Database

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
