"""Reads collected metrics files of jobs into the metric store, each from where the last read ended.

``sources/`` knows which files there are and how to read each kind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ugro.core.metrics import is_internal
from ugro.telemetry.metricstore import Batch, MetricStore, Place, Source, job_owner
from ugro.telemetry.series import Points, SeriesKey
from ugro.telemetry.sources import discovery
from ugro.telemetry.sources.discovery import MetricFile
from ugro.telemetry.sources.reading import AT_ONCE, Key, Origin, Piece, Reading

_START = Place(0)
_LOOKING_SHARE = 0.05
_MOST_JOBS = 10_000


class _File(NamedTuple):
    source: Source
    about: MetricFile
    size: int
    changed_ms: int


@dataclass(slots=True)
class _Job:
    """What is known of a job's files: most looks at it then need no database."""

    files: list[MetricFile] = field(default_factory=list)
    until: float = 0.0  # monotonic: when to look for more files
    places: dict[Source, Place] | None = None  # None: not read yet
    cut: set[str] = field(default_factory=set)  # the names of files with a line that is too long to be read


class Collector:
    def __init__(self, folder: Path, store: MetricStore, looking_share: float = _LOOKING_SHARE) -> None:
        """A job may have a hundred thousand files: looking for new ones takes at most that share of the time."""
        self._looking_share = looking_share
        self._folder = folder
        self._store = store
        self._collecting = asyncio.Lock()
        self._jobs: dict[int, _Job] = {}
        self._cut: dict[int, set[str]] = {}  # of jobs that were finished

    @property
    def has_no_room(self) -> bool:
        return self._store.has_no_room

    async def collect(self, job: int) -> int:
        """Reads everything that is new; returns the number of points."""
        async with self._collecting:
            return await self._collect(job)

    async def finish(self, job: int) -> int:
        """Reads the rest after the job's end, and compacts its curves."""
        async with self._collecting:
            if (known := self._jobs.get(job)) is not None:
                known.until = 0.0
            count = await self._collect(job)
            known = self._jobs.pop(job, None)
            self._cut |= {job: known.cut} if known is not None and known.cut else {}
        await self._store.seal(job_owner(job))
        return count

    def take_cut(self, job: int) -> set[str]:
        """The names of files that have, since the last call, had a line which is too long to be read."""
        known = self._jobs.get(job, _Job())
        found, known.cut = known.cut | self._cut.pop(job, set()), set()
        return found

    async def having_news(self, live: Iterable[int], over: Iterable[int]) -> list[int]:
        """The jobs whose files may have grown, and those with files that are over."""
        async with self._collecting:
            return await asyncio.to_thread(self._having_news, live, over)

    def _having_news(self, live: Iterable[int], over: Iterable[int]) -> list[int]:
        found = [job for job in live if self._has_news(job)]
        return [*found, *(job for job in over if discovery.find(self._folder / str(job)))]

    def jobs(self) -> list[int]:
        """The jobs with collected files. Blocks."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self._folder) if entry.name.isdigit())
        except FileNotFoundError:
            return []

    async def _collect(self, job: int) -> int:
        files = await asyncio.to_thread(self._files, job)
        if not files:
            return 0
        known = self._jobs.setdefault(job, _Job())
        if known.places is None:
            known.places = await self._store.places(job_owner(job))
        if spoilt := [file.source for file in files if _is_spoilt(file, known.places.get(file.source))]:
            for source in spoilt:
                await self._store.start_again(source)
            known.places = await self._store.places(job_owner(job))
        places, known.places = known.places, None
        count = await self._read([file for file in files if _has_grown(file, places)], known, places)
        known.places = places  # not after an error: what the database then has is read again, so nothing is doubled
        return count

    async def _read(self, grown: Iterable[_File], known: _Job, places: dict[Source, Place]) -> int:
        count = 0
        unread = deque(grown)
        while unread:
            batch = await asyncio.to_thread(_next_batch, unread, places, known.cut)
            await self._store.take(batch)
            places |= batch.places
            count += sum(len(points) for points in batch.points.values())
        return count

    def _has_news(self, job: int) -> bool:
        files, known = self._files(job), self._jobs.get(job)
        if known is None or known.places is None:
            return bool(files)
        places = known.places
        return any(file.size != places.get(file.source, _START).offset for file in files)

    def _files(self, job: int) -> list[_File]:
        found = []
        for about in self._metric_files(job):
            try:
                status = about.path.lstat()
            except OSError:  # gone, or not there for a moment: what was read of it stays
                continue
            source = Source(job_owner(job), about.attempt, about.name)
            found.append(_File(source, about, status.st_size, status.st_mtime_ns // 1_000_000))
        return found

    def _metric_files(self, job: int) -> list[MetricFile]:
        known = self._jobs.get(job)
        begin = time.monotonic()
        if known is not None and begin < known.until:
            return known.files
        files = discovery.find(self._folder / str(job))
        end = time.monotonic()
        if files:
            known = self._jobs.setdefault(job, _Job())
            known.files, known.until = files, end + (end - begin) / self._looking_share
        while len(self._jobs) > _MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]
        return files


def _is_spoilt(file: _File, place: Place | None) -> bool:
    """The file was rewritten, or its run has got a neighbour and its metrics therefore another name."""
    return place is not None and (file.size < place.offset or file.about.prefix != place.prefix)


def _has_grown(file: _File, places: Mapping[Source, Place]) -> bool:
    return file.size > places.get(file.source, _START).offset


def _next_batch(unread: deque[_File], places: Mapping[Source, Place], cut: set[str]) -> Batch:
    """Reads as many files as fit into one step; removes those that have no more."""
    batch, size = Batch(), 0
    while unread and size < AT_ONCE:
        file = unread[0]
        place = batch.places.get(file.source) or places.get(file.source, _START)
        content = _content(file.about.path, place.offset)
        size += len(content)
        piece = Piece(content, place.offset, file.size, place.state)
        reading = file.about.writer.read(piece)
        if reading.has_cut:
            cut.add(file.about.name)
        if len(content) < AT_ONCE or not reading.end:
            unread.popleft()
        if reading.end:
            batch.places[file.source] = Place(place.offset + reading.end, reading.state, file.about.prefix)
            _add(batch, file, reading)
    return batch


def _content(path: Path, offset: int) -> bytes:
    try:
        # The name comes from a node: links that lead elsewhere are not followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, AT_ONCE, offset)
    finally:
        os.close(descriptor)


def _add(batch: Batch, file: _File, reading: Reading) -> None:
    for key, points in reading.points.items():
        _add_points(batch, _series_key(file, key), key.origin, _timed(points, file.changed_ms))
    if reading.parameters:
        batch.parameters.setdefault(file.source.owner, {}).update(reading.parameters)


def _series_key(file: _File, key: Key) -> SeriesKey:
    # The folder says which attempt it belongs to: what the rank wrote is not trusted.
    rank = file.about.rank if key.rank is None else key.rank
    name = key.name if is_internal(key.name) else file.about.prefix + key.name
    return SeriesKey(file.source.owner, file.source.attempt, rank, name)


def _timed(points: Points, time_ms: int) -> Points:
    """Points without a time get that of their file: a curve without one would count as old, and be removed."""
    if not all(points.times_ms):
        points.times_ms = [own or time_ms for own in points.times_ms]
    return points


def _add_points(batch: Batch, key: SeriesKey, origin: Origin, points: Points) -> None:
    if key not in batch.points or origin < batch.origins.get(key, Origin.UGRO):
        batch.points[key] = points
        batch.origins.pop(key, None)
        if origin:
            batch.origins[key] = origin
    elif origin == batch.origins.get(key, Origin.UGRO):  # from another file
        batch.points[key].extend(points)
