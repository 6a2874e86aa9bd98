"""The metric store: curves of jobs and nodes, in a database of their own, bounded in age and in size.

A run's metrics are appended together with how much of its file was read: what a crash loses is read again, and nothing
comes twice. Reading has a connection of its own, so that a large chart holds back no writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ugro.kernel.links.model import Gpu, NodeReport
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database, Design, Work, is_short
from ugro.kernel.store.examine import Thoroughness
from ugro.kernel.support.errors import Damaged
from ugro.kernel.support.secrets import is_secret
from ugro.kernel.telemetry import curves as series
from ugro.kernel.telemetry.curves import Curve, Points, SeriesKey, Wanted, read_curves, read_keys, read_raw
from ugro.kernel.telemetry.model import INTERNAL, Figure, KeySummary

# --- figures of many jobs ---------------------------------------------------------------------------------------------
# The last, smallest and largest value of each metric of thousands of jobs are read without their curves.


_MOST_KEYS = 100  # of one job
_COLUMNS = (
    "owner, attempt, rank, key, count, last_step, finite_value, value_min, value_max, min_step, max_step, odd_step"
)
_CHOSEN = "count > 0" + "".join(f" AND substr(key, 1, {len(one)}) <> '{one}'" for one in INTERNAL)


def read_figures(
    db: Connection, owners: Sequence[str] | None, attempt: int | None = None
) -> dict[str, dict[str, Figure]]:
    """By owner and key: of the newest attempt and the first rank that have it; no later attempt than the given one.

    ``None``: of all jobs.
    """
    found: dict[str, dict[str, tuple[tuple[int, int], Row]]] = {}
    for row in _rows(db, owners):
        if attempt is not None and row["attempt"] > attempt:
            continue
        keys = found.setdefault(row["owner"], {})
        order = (row["attempt"], -row["rank"])
        known = keys.get(row["key"])
        if known[0] < order if known is not None else len(keys) < _MOST_KEYS:
            keys[row["key"]] = (order, row)
    return {owner: {key: _figure(row) for key, (_, row) in sorted(keys.items())} for owner, keys in found.items()}


def _rows(db: Connection, owners: Sequence[str] | None) -> Iterable[Row]:
    if owners is None:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner >= 'job/' AND owner < 'job0' AND {_CHOSEN}")
        return
    for owner in owners:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner = ? AND {_CHOSEN}", (owner,))


def _figure(row: Row) -> Figure:
    return Figure(
        row["finite_value"], row["value_min"], row["value_max"], row["last_step"], row["count"],
        row["min_step"], row["max_step"], row["odd_step"],
    )  # fmt: skip


# --- parameters that trainings wrote ----------------------------------------------------------------------------------


_MOST = 200  # of one job


def write_parameters(db: Connection, owner: str, given: Mapping[str, str]) -> None:
    """Those that look secret are left out."""
    known = {row["name"] for row in db.execute("SELECT name FROM parameter WHERE owner = ?", (owner,))}
    room = _MOST - len(known)
    for name, value in given.items():
        if is_secret(name, value):
            continue
        room -= name not in known
        if name in known or room >= 0:
            db.execute("INSERT OR REPLACE INTO parameter (owner, name, value) VALUES (?, ?, ?)", (owner, name, value))


def read_parameters(db: Connection, owners: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """By owner and name. ``None``: of all jobs."""
    found: dict[str, dict[str, str]] = {}
    for row in _parameters_rows(db, owners):
        found.setdefault(row["owner"], {})[row["name"]] = row["value"]
    return found


def _parameters_rows(db: Connection, owners: Sequence[str] | None) -> Iterable[Row]:
    if owners is None:
        yield from db.execute("SELECT * FROM parameter ORDER BY owner, name")
    for owner in owners or ():
        yield from db.execute("SELECT * FROM parameter WHERE owner = ? ORDER BY name", (owner,))


# --- the metric store -------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

T = TypeVar("T")

# A file of many gigabytes is not read through at every start: damage is found when it is met, too.
_DESIGN = Design("ugro.kernel.telemetry", ("series", "chunk", "source"), Thoroughness("quick_check", limit_s=0.5))
MOST_FOUND = 2000  # curves of a job from files of other libraries
NODE = "node/"
JOB = "job/"


class Source(NamedTuple):
    """A file that points are read from, below the folder of its attempt."""

    owner: str
    attempt: int
    path: str


class Place(NamedTuple):
    """How far a file has been read."""

    offset: int
    state: str = ""  # what its reader needs to go on
    prefix: str = ""  # of the names of its metrics


@dataclass(slots=True)
class Batch:
    """What one step of reading files brings, for one transaction."""

    points: dict[SeriesKey, Points] = field(default_factory=dict)
    origins: dict[SeriesKey, int] = field(default_factory=dict)  # those other than zero
    places: dict[Source, Place] = field(default_factory=dict)
    parameters: dict[str, dict[str, str]] = field(default_factory=dict)  # by owner


@dataclass(frozen=True, slots=True)
class Limits:
    node_hours: float = 24.0
    job_days: float = 365.0
    bytes: int = 10 * 10**9


def job_owner(job: int) -> str:
    return f"{JOB}{job}"


def node_owner(node: str) -> str:
    return f"{NODE}{node}"


class MetricStore:
    def __init__(
        self, path: Path, before_take: Callable[[Mapping[SeriesKey, Points]], Awaitable[None]] | None = None
    ) -> None:
        """``before_take`` sees all points."""
        self._path = path
        self._before_take = before_take
        self._writing, self._reading = _connections(path)
        self._replacing = asyncio.Lock()
        self._on_change: Callable[[frozenset[str]], None] = lambda owners: None

    async def open(self) -> None:
        """A damaged file is moved aside: the metrics of jobs are read again from their files."""
        try:
            await self._writing.open()
        except Damaged as error:
            await asyncio.to_thread(_put_aside, self._path, error)
            self._writing, self._reading = _connections(self._path)
            await self._writing.open()
        await self._reading.open()

    async def close(self) -> None:
        await self._reading.close()
        await self._writing.close()

    async def _write(self, work: Work[T]) -> T:
        return await self._run(self._writing, work)

    async def _read(self, work: Work[T]) -> T:
        return await self._run(self._reading, work)

    async def _run(self, database: Database, work: Work[T]) -> T:
        try:
            return await database.run(work)
        except Damaged as error:
            async with self._replacing:
                if database in (self._writing, self._reading):  # else another call has replaced it
                    await self._replace(error)
            raise

    async def _replace(self, error: Damaged) -> None:
        await asyncio.to_thread(_put_aside, self._path, error)
        old = self._writing, self._reading
        fresh = _connections(self._path)
        for database in fresh:
            await database.open()
        self._writing, self._reading = fresh
        for database in old:
            await database.close()

    def listen(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """``on_change`` is called with the owners whose curves have grown or lost points."""
        self._on_change = on_change

    @property
    def has_no_room(self) -> bool:
        """Its disk is full: what is left there is for the state."""
        return is_short(self._path.parent)

    async def append(self, points: Mapping[SeriesKey, Points]) -> None:
        """Without room for them, points that come again and again are left out."""
        if self.has_no_room:
            return
        await self.take(Batch(dict(points)))

    async def take(self, batch: Batch) -> None:
        """Adds points, and records how far their files have been read, in one transaction."""
        if self._before_take is not None and batch.points:
            await self._before_take(batch.points)
        await self._write(lambda db: _take(db, batch))
        self._on_change(frozenset(key.owner for key in batch.points) | batch.parameters.keys())

    async def places(self, owner: str) -> dict[Source, Place]:
        query = "SELECT * FROM source WHERE owner = ?"
        return await self._write(
            lambda db: {
                Source(row["owner"], row["attempt"], row["path"]): Place(row["place"], row["state"], row["prefix"])
                for row in db.execute(query, (owner,))
            }
        )

    async def start_again(self, source: Source) -> None:
        """For a file that was rewritten, or whose metrics get other names.

        Drops the points of its attempt, whose files are then read again.
        """
        await self._write(lambda db: _start_again(db, source))

    async def seal(self, owner: str) -> None:
        await self._write(lambda db: series.seal(db, owner))

    async def curves(self, wanted: Wanted) -> list[Curve]:
        return await self._read(lambda db: read_curves(db, wanted))

    async def keys(self, wanted: Wanted) -> list[KeySummary]:
        return await self._read(lambda db: read_keys(db, wanted))

    async def figures(
        self, jobs: Sequence[int] | None = None, attempt: int | None = None
    ) -> dict[int, dict[str, Figure]]:
        """By job and key, for some jobs or all; without attempts after that one."""
        owners = None if jobs is None else [job_owner(job) for job in jobs]
        found = await self._read(lambda db: read_figures(db, owners, attempt))
        return {int(owner.removeprefix(JOB)): figures for owner, figures in found.items()}

    async def parameters(self, jobs: Sequence[int] | None = None) -> dict[int, dict[str, str]]:
        """What trainings wrote beside their metrics, by job and name, for some jobs or all."""
        owners = None if jobs is None else [job_owner(job) for job in jobs]
        found = await self._read(lambda db: read_parameters(db, owners))
        return {int(owner.removeprefix(JOB)): given for owner, given in found.items()}

    async def means(self, job: int, names: Sequence[str], attempt: int) -> dict[str, float]:
        """Of the same attempts and ranks as the figures."""
        if not names:
            return {}
        wanted = Wanted((job_owner(job),), tuple(names), bins=1)
        found: dict[str, Curve] = {}
        for curve in await self.curves(wanted):
            if curve.attempt <= attempt:
                known = found.get(curve.key)
                if known is None or (known.attempt, -known.rank) < (curve.attempt, -curve.rank):
                    found[curve.key] = curve
        return {name: mean for name, curve in found.items() if (mean := curve.mean) is not None}

    async def points(self, wanted: Wanted) -> dict[SeriesKey, Points]:
        return await self._read(lambda db: read_raw(db, wanted))

    async def size_bytes(self) -> int:
        return await self._read(_size_bytes)

    async def forget_jobs(self, jobs: Sequence[int]) -> None:
        """Removes all metrics of removed jobs."""
        owners = [job_owner(job) for job in jobs]
        await self._write(lambda db: _forget_owners(db, owners))

    async def keep_within(self, limits: Limits, now: float | None) -> list[str]:
        """Removes what is too old, then points of the oldest jobs if there are too many. Returns their owners.

        Without ``now`` nothing is too old: the time is not known for sure.
        """
        forgotten: list[str] = []
        ages = ((NODE, limits.node_hours * 3600), (JOB, limits.job_days * 86400))
        for kind, age_s in ages if now is not None else ():
            assert now is not None
            forgotten += await self._write(partial(_forget, kind=kind, before=now - age_s))
        while await self.size_bytes() > limits.bytes:
            oldest = await self._write(_drop_oldest_points)
            if oldest is None:
                break
            forgotten.append(oldest)
        if forgotten:
            self._on_change(frozenset(forgotten))
        return forgotten


def _connections(path: Path) -> tuple[Database, Database]:
    """To write and to read."""
    return Database(path, _DESIGN), Database(path, replace(_DESIGN, how=None))


def _put_aside(path: Path, error: Damaged) -> None:
    """Only the newest such file is kept."""
    for older in path.parent.glob(f"{path.name}.damaged-*"):
        with contextlib.suppress(OSError):
            older.unlink()
    aside = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for ending in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + ending).replace(aside.with_name(aside.name + ending))
    log.error("%s; moved to %s; metrics of jobs are read again from their files", error, aside.name)


def _take(db: Connection, batch: Batch) -> None:
    counts: dict[str, int] = {}
    for key, some in batch.points.items():
        origin = batch.origins.get(key, 0)
        if origin and not _has_room(db, key, counts):
            continue
        series.append(db, key, some, origin)
    db.executemany(
        "INSERT INTO source (owner, attempt, path, place, state, prefix) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (owner, attempt, path) DO UPDATE "
        "SET place = excluded.place, state = excluded.state, prefix = excluded.prefix",
        [(*source, *place) for source, place in batch.places.items()],
    )
    for owner, given in batch.parameters.items():
        write_parameters(db, owner, given)


def _has_room(db: Connection, key: SeriesKey, counts: dict[str, int]) -> bool:
    """Bounds what a file with a million names can add."""
    if key.owner not in counts:
        counts[key.owner] = series.count_found(db, key.owner)
    if series.has(db, key):
        return True
    counts[key.owner] += 1
    return counts[key.owner] <= MOST_FOUND


def _start_again(db: Connection, source: Source) -> None:
    _delete(db, db.execute("SELECT id FROM series WHERE owner = ? AND attempt = ?", source[:2]).fetchall())
    db.execute("DELETE FROM source WHERE owner = ? AND attempt = ?", source[:2])


def _forget(db: Connection, kind: str, before: float) -> list[str]:
    """Removes the beginning of a node's curves, and old jobs as a whole; how far their files were read is kept."""
    forgotten = []
    for owner, last_ms in series.owners_by_age(db, kind):
        if last_ms / 1000 < before:
            _delete(db, db.execute("SELECT id FROM series WHERE owner = ?", (owner,)).fetchall())
            forgotten.append(owner)
        elif kind == NODE:
            series.forget_before(db, owner, int(before))
    return forgotten


def _forget_owners(db: Connection, owners: Sequence[str]) -> None:
    for owner in owners:
        _delete(db, db.execute("SELECT id FROM series WHERE owner = ?", (owner,)).fetchall())
        for table in ("source", "parameter"):
            db.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))


def _drop_oldest_points(db: Connection) -> str | None:
    """Removes the points of the job with the oldest last point; the summaries of its curves stay."""
    for owner, _ in series.owners_by_age(db, JOB):
        numbers = db.execute(
            "SELECT DISTINCT series AS id FROM chunk JOIN series ON series.id = chunk.series WHERE owner = ?", (owner,)
        ).fetchall()
        if numbers:
            series.seal(db, owner)
            db.executemany("DELETE FROM chunk WHERE series = ?", [(row["id"],) for row in numbers])
            return owner
    return None


def _delete(db: Connection, rows: Iterable[Row]) -> None:
    numbers: Sequence[tuple[int]] = [(row["id"],) for row in rows]
    db.executemany("DELETE FROM chunk WHERE series = ?", numbers)
    db.executemany("DELETE FROM series WHERE id = ?", numbers)


def _size_bytes(db: Connection) -> int:
    """The size of the used pages; free pages are used again."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return int((pages - free) * size)


# --- a node's report as points ----------------------------------------------------------------------------------------
# There is at most one point per second.


def samples(report: NodeReport, now: float) -> dict[SeriesKey, Points]:
    """The step of a point is its unix second."""
    second, time_ms = int(now), int(now * 1000)
    return {
        SeriesKey(node_owner(report.name), 0, 0, key): Points([second], [time_ms], [float(value)])
        for key, value in _values(report)
        if value is not None
    }


def _values(report: NodeReport) -> Iterator[tuple[str, float | None]]:
    yield "score", report.score
    yield "up", 0.0 if report.facts is None else 1.0
    yield "link/latency_s", report.link.rtt_s
    yield "link/loss_ratio", report.link.loss_ratio if report.facts else None
    facts = report.facts
    if facts is None:
        return
    yield "cpu/use_ratio", facts.cpu_use_ratio
    yield "cpu/load", facts.load[0]
    yield "memory/used_ratio", facts.memory_used_ratio
    for disk in facts.disks:
        yield f"disk/{disk.mount}/used_ratio", disk.used_ratio
    for gpu in facts.gpus:
        for name, value in _of_gpu(gpu):
            yield f"gpu/{gpu.index}/{name}", value


def _of_gpu(gpu: Gpu) -> Iterator[tuple[str, float | None]]:
    yield "use_ratio", gpu.use_ratio
    yield "memory_used_bytes", gpu.memory_used_bytes
    yield "memory_used_ratio", gpu.memory_ratio
    yield "temperature_c", gpu.temperature_c
    yield "power_w", gpu.power_w
    yield "throttled", None if gpu.throttle is None else float(bool(gpu.throttle))
    if gpu.power_w is not None and gpu.power_limit_w:
        yield "power_limit_ratio", gpu.power_w / gpu.power_limit_w
