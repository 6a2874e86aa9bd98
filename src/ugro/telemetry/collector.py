"""Reads the metrics that came home with runs into the metric store, from where it was the last time.

A job's folder has ``attempt_N/output/metrics.jsonl`` of its first node and ``attempt_N/nodes/NODE/metrics.jsonl`` of
the others; what a rank writes into a file of its own is named ``metrics*.jsonl`` as well.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ugro.telemetry import records
from ugro.telemetry.metricstore import MetricStore, Source, job_owner
from ugro.telemetry.series import Points, SeriesKey

_AT_ONCE = 4 << 20  # bytes of one file, which then are one transaction
_MOST_FILES = 10_000
_NAME = re.compile(r"metrics[\w.-]*\.jsonl")
_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


@dataclass(slots=True)
class _Batch:
    source: Source
    points: dict[SeriesKey, Points] = field(default_factory=dict)
    place: int = 0
    was_cut: bool = False  # the file is shorter than what was read of it


class Collector:
    def __init__(self, folder: Path, store: MetricStore) -> None:
        self._folder = folder
        self._store = store
        self._collecting = asyncio.Lock()

    async def collect(self, job: int) -> int:
        """All that is there and not yet read; how many points that was."""
        async with self._collecting:
            owner = job_owner(job)
            places = await self._store.places(owner)
            count = 0
            for source, path in await asyncio.to_thread(lambda: list(self._files(job, owner))):
                count += await self._read(source, path, places.get(source, 0))
            return count

    async def finish(self, job: int) -> int:
        """The last of it: its curves are put in order."""
        count = await self.collect(job)
        await self._store.seal(job_owner(job))
        return count

    def jobs(self) -> list[int]:
        """Those of which something came home. Blocks."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self._folder) if entry.name.isdigit())
        except FileNotFoundError:
            return []

    async def _read(self, source: Source, path: Path, place: int) -> int:
        count = 0
        while True:
            batch = await asyncio.to_thread(_next_batch, source, path, place)
            if batch.was_cut and place:
                await self._store.start_again(source)
                return count  # the next look reads all files of the attempt
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


def _next_batch(source: Source, path: Path, place: int) -> _Batch:
    """Whole lines from ``place`` on; the last one may still be on its way."""
    batch = _Batch(source, place=place)
    try:
        # A name from a node: what it leads to elsewhere is none of our files.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return batch
    try:
        size = os.fstat(descriptor).st_size
        batch.was_cut = size < place
        content = os.pread(descriptor, _AT_ONCE, place) if size > place else b""
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
    found: dict[tuple[int, str], Points] = {}
    for line in lines:
        record = records.read(line)
        if record is None:
            continue
        for name, value in record.values:
            points = found.get((record.rank, name))
            if points is None:
                points = found[record.rank, name] = Points()
            points.add(record.step, record.time_ms, value)
    return found
