"""Reads collected metrics files of runs into the metric store, each from where the last read ended.

A job's folder has ``attempt_N/output/metrics.jsonl`` of its first node and ``attempt_N/nodes/NODE/metrics.jsonl`` of
the others; what a rank writes into a file of its own is named ``metrics*.jsonl`` as well.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ugro.telemetry import records
from ugro.telemetry.metricstore import MetricStore, Source, job_owner
from ugro.telemetry.series import Points, SeriesKey

_AT_ONCE = 4 << 20  # bytes of one file per step; about as much of many files is one transaction
_MOST_FILES = 10_000
_LARGEST = 1 << 62
_NAME = re.compile(r"metrics[\w.-]*\.jsonl")
_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


class _File(NamedTuple):
    source: Source
    path: Path
    size: int


@dataclass(slots=True)
class _Batch:
    points: dict[SeriesKey, Points] = field(default_factory=dict)
    places: dict[Source, int] = field(default_factory=dict)  # how far their files have been read


class Collector:
    def __init__(self, folder: Path, store: MetricStore) -> None:
        self._folder = folder
        self._store = store
        self._collecting = asyncio.Lock()

    async def collect(self, job: int) -> int:
        """Reads everything that is new; returns the number of points."""
        async with self._collecting:
            owner = job_owner(job)
            files = await asyncio.to_thread(lambda: list(self._files(job, owner)))
            places = await self._store.places(owner)
            cut = [file.source for file in files if file.size < places.get(file.source, 0)]
            for source in cut:
                await self._store.start_again(source)
            if cut:
                places = await self._store.places(owner)
            return await self._read([file for file in files if file.size > places.get(file.source, 0)], places)

    async def finish(self, job: int) -> int:
        """Reads the rest after the job's end, and compacts its curves."""
        count = await self.collect(job)
        await self._store.seal(job_owner(job))
        return count

    def having_some(self, jobs: Iterable[int]) -> list[int]:
        """The jobs with collected metrics. Blocks."""
        return [job for job in jobs if next(self._files(job, ""), None) is not None]

    def jobs(self) -> list[int]:
        """The jobs with collected files. Blocks."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self._folder) if entry.name.isdigit())
        except FileNotFoundError:
            return []

    async def _read(self, grown: Iterable[_File], places: Mapping[Source, int]) -> int:
        count = 0
        unread, places = deque(grown), dict(places)
        while unread:
            batch = await asyncio.to_thread(_next_batch, unread, places)
            if batch.places:
                await self._store.append(batch.points, batch.places)
                places |= batch.places
                count += sum(len(points) for points in batch.points.values())
        return count

    def _files(self, job: int, owner: str) -> Iterator[_File]:
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
                    yield _File(Source(owner, int(number[1]), str(file.relative_to(attempt))), file, _size(file))


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
    """Infinite if the size is unknown: then the file counts as not truncated."""
    try:
        return path.lstat().st_size
    except OSError:
        return _LARGEST


def _next_batch(unread: deque[_File], places: Mapping[Source, int]) -> _Batch:
    """Reads as many files as fit into one step; removes those that have no more."""
    batch, size = _Batch(), 0
    while unread and size < _AT_ONCE:
        source, path, _ = unread[0]
        place = places.get(source, 0)
        content = _content(path, place)
        size += len(content)
        if len(content) < _AT_ONCE:
            unread.popleft()
        if end := _end_of_lines(content):
            batch.places[source] = place + end
            _add_lines(batch.points, source, content[:end].splitlines())
    return batch


def _content(path: Path, place: int) -> bytes:
    try:
        # The name comes from a node: links that lead elsewhere are not followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, _AT_ONCE, place)
    finally:
        os.close(descriptor)


def _end_of_lines(content: bytes) -> int:
    """Whole lines only; the last one may be incomplete."""
    end = content.rfind(b"\n") + 1
    if not end and len(content) >= records.LONGEST_LINE:
        return len(content)  # no valid line is that long
    return end


def _add_lines(points: dict[SeriesKey, Points], source: Source, lines: list[bytes]) -> None:
    for which, some in _points(lines).items():
        # The folder says which attempt it belongs to: what the rank wrote is not trusted.
        key = SeriesKey(source.owner, source.attempt, *which)
        if key in points:  # from another file
            points[key].extend(some)
        else:
            points[key] = some


def _points(lines: list[bytes]) -> dict[tuple[int, str], Points]:
    # Nearly all lines have the same keys, so a table of them is transposed at once.
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
    if key in found:  # from another table: their lines alternate
        points.extend(found[key])
        order = sorted(range(len(points)), key=points.times_ms.__getitem__)
        columns = (points.steps, points.times_ms, points.values)
        points = Points(*([column[at] for at in order] for column in columns))  # type: ignore[arg-type]
    found[key] = points
