"""Reads the metrics that came home with runs into the metric store, from where it was the last time.

A job's folder has ``attempt_N/output/metrics.jsonl`` of its first node and ``attempt_N/nodes/NODE/metrics.jsonl`` of
the others; what a rank writes into a file of its own is named ``metrics*.jsonl`` as well.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ugro.telemetry import records
from ugro.telemetry.metricstore import MetricStore, Source, job_owner
from ugro.telemetry.series import Points, SeriesKey

_AT_ONCE = 4 << 20  # bytes of one file, which then are one transaction
_MOST_FILES = 10_000
_LARGEST = 1 << 62
_NAME = re.compile(r"metrics[\w.-]*\.jsonl")
_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


@dataclass(slots=True)
class _Batch:
    source: Source
    points: dict[SeriesKey, Points] = field(default_factory=dict)
    place: int = 0


class Collector:
    def __init__(self, folder: Path, store: MetricStore) -> None:
        self._folder = folder
        self._store = store
        self._collecting = asyncio.Lock()

    async def collect(self, job: int) -> int:
        """All that is there and not yet read; how many points that was."""
        async with self._collecting:
            owner = job_owner(job)
            files = await asyncio.to_thread(lambda: list(self._files(job, owner)))
            places = await self._store.places(owner)
            cut = [source for source, path in files if _size(path) < places.get(source, 0)]
            for source in cut:
                await self._store.start_again(source)
            if cut:
                places = await self._store.places(owner)
            return sum([await self._read(source, path, places.get(source, 0)) for source, path in files])

    async def finish(self, job: int) -> int:
        """The last of it: its curves are put in order."""
        count = await self.collect(job)
        await self._store.seal(job_owner(job))
        return count

    def having_some(self, jobs: Iterable[int]) -> list[int]:
        """Those of which metrics came home. Blocks."""
        return [job for job in jobs if next(self._files(job, ""), None) is not None]

    def jobs(self) -> list[int]:
        """Those of which anything came home. Blocks."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self._folder) if entry.name.isdigit())
        except FileNotFoundError:
            return []

    async def _read(self, source: Source, path: Path, place: int) -> int:
        count = 0
        while True:
            batch = await asyncio.to_thread(_next_batch, source, path, place)
            if batch.place == place:
                return count
            place = batch.place
            await self._store.append(batch.points, {source: place})
            count += sum(len(points) for points in batch.points.values())

    def _files(self, job: int, owner: str) -> Iterator[tuple[Source, Path]]:
        home = self._folder / str(job)
        found = 0
        for attempt in _folders(home):
            number = _ATTEMPT.fullmatch(attempt.name)
            if number is None:
                continue
            for folder in (attempt / "output", *_folders(attempt / "nodes")):
                for file in _metrics_files(folder):
                    found += 1
                    if found > _MOST_FILES:
                        return
                    yield Source(owner, int(number[1]), str(file.relative_to(attempt))), file


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _metrics_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
            return sorted(Path(entry.path) for entry in found)
    except OSError:
        return []


def _size(path: Path) -> int:
    """As if endless when nobody can tell: it was not cut, as far as we know."""
    try:
        return path.lstat().st_size
    except OSError:
        return _LARGEST


def _next_batch(source: Source, path: Path, place: int) -> _Batch:
    """Whole lines from ``place`` on; the last one may still be on its way."""
    batch = _Batch(source, place=place)
    try:
        # A name from a node: what it leads to elsewhere is none of our files.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return batch
    try:
        content = os.pread(descriptor, _AT_ONCE, place)
    finally:
        os.close(descriptor)
    end = content.rfind(b"\n") + 1
    if not end and len(content) >= records.LONGEST_LINE:
        end = len(content)  # no line of ours is as long
    # Where it came home says which attempt it is of: what the rank says counts for nothing.
    found = _points(content[:end].splitlines())
    batch.points = {SeriesKey(source.owner, source.attempt, *which): points for which, points in found.items()}
    batch.place = place + end
    return batch


def _points(lines: list[bytes]) -> dict[tuple[int, str], Points]:
    # Nearly all lines have the same names: a table of them is turned into its columns at once.
    tables: dict[tuple[int, tuple[str, ...]], list[records.Record]] = {}
    for record in records.read_all(lines):
        tables.setdefault((record.rank, tuple(record.values)), []).append(record)
    found: dict[tuple[int, str], Points] = {}
    for (rank, names), table in tables.items():
        steps, times = [record.step for record in table], [record.time_ms for record in table]
        columns = zip(*(record.values.values() for record in table), strict=True)
        for name, column in zip(names, columns, strict=True):
            _add(found, (rank, name), Points(list(steps), list(times), list(column)))
    return found


def _add(found: dict[tuple[int, str], Points], key: tuple[int, str], points: Points) -> None:
    if key in found:  # of another table: they came in turn
        points.extend(found[key])
        order = sorted(range(len(points)), key=points.times_ms.__getitem__)
        columns = (points.steps, points.times_ms, points.values)
        points = Points(*([column[at] for at in order] for column in columns))  # type: ignore[arg-type]
    found[key] = points
