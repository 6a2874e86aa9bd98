"""Reads collected metrics files of jobs into the metric store, each from where the last read ended.

``readers`` and the feature ``trackers`` know which files there are and how to read each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ugro.features.trackers import readers as tensorboard
from ugro.features.trackers import wandb
from ugro.kernel.telemetry import readers as ugro
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.metricstore import Batch, MetricStore, Place, Source, job_owner
from ugro.kernel.telemetry.model import is_internal, is_metric_file
from ugro.kernel.telemetry.readers import AT_ONCE, Key, Origin, Piece, Read, Reading

# --- finding files with metrics ---------------------------------------------------------------------------------------
# They are in the folder of a job, whatever brought them there: ``attempt_N/output/`` has the files of the first node,
# ``attempt_N/nodes/NODE/`` those of the others.


_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")
_MOST_FILES = 10_000  # of one job
_MOST_ENTRIES = 500_000
_LARGEST_CONFIG = 16 << 20


class Writer(NamedTuple):
    """Who wrote a file: files of the same kind and run are one run."""

    read: Read
    run: str


class MetricFile(NamedTuple):
    attempt: int
    name: str  # below the folder of its attempt
    path: Path
    writer: Writer
    rank: int  # of the points whose file does not name it
    prefix: str  # of the names of its metrics, where there are several runs


def find(job: Path) -> list[MetricFile]:
    """Blocks."""
    return list(islice(_find(job), _MOST_FILES))


def attempts(job: Path) -> Iterator[tuple[int, Path]]:
    for folder in _folders(job):
        if number := _ATTEMPT.fullmatch(folder.name):
            yield int(number[1]), folder


def writer_of(name: str) -> Writer | None:
    """``name`` is a path below the folder of a node's files."""
    if not is_metric_file(name):
        return None
    path = PurePosixPath(name)
    if path.name.startswith("events.out.tfevents."):
        return Writer(tensorboard.read, str(path.parent))
    if path.suffix == ".wandb":
        return Writer(wandb.read, path.stem.removeprefix("run-"))
    return Writer(ugro.read, str(path.parent))


def prefixes(runs: Iterable[str]) -> dict[str, str]:
    """What to write before the names of each run's metrics: the part of its path that it does not share with others."""
    paths = {run: PurePosixPath(run).parts for run in runs}
    # Of the first and the last in order, all others share at least as much.
    least, most = min(paths.values(), default=()), max(paths.values(), default=())
    differing = (at for at, (one, other) in enumerate(zip(least, most, strict=False)) if one != other)
    shared = next(differing, min(len(least), len(most)))
    return {run: "".join(f"{part}/" for part in parts[shared:]) for run, parts in paths.items()}


def _find(job: Path) -> Iterator[MetricFile]:
    for attempt, folder in attempts(job):
        yield from _of_node(attempt, folder, "output", 0)
        nodes = [node.name for node in _folders(folder / "nodes")]
        ranks = _first_ranks(job, attempt) if nodes else {}
        for place, node in enumerate(nodes, 1):
            yield from _of_node(attempt, folder, f"nodes/{node}", ranks.get(node, place))


def _of_node(attempt: int, folder: Path, below: str, rank: int) -> Iterator[MetricFile]:
    root = folder / below
    writers = {name: writer for name in _names(root) if (writer := writer_of(name)) is not None}
    runs: dict[Read, set[str]] = {}
    for writer in writers.values():
        runs.setdefault(writer.read, set()).add(writer.run)
    named = {kind: prefixes(of_kind) for kind, of_kind in runs.items()}
    # In the order of their names, which contain times: the newest is read last.
    for name, writer in sorted(writers.items()):
        yield MetricFile(attempt, f"{below}/{name}", root / name, writer, rank, named[writer.read][writer.run])


def _names(root: Path) -> Iterator[str]:
    """Regular files below a folder: links that lead elsewhere are not followed."""
    folders, seen = [""], 0
    while folders and seen < _MOST_ENTRIES:
        below = folders.pop()
        with contextlib.suppress(OSError), os.scandir(root / below) as entries:
            for entry in entries:
                seen += 1
                if not entry.name.isprintable():  # the database has no place for such names
                    continue
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    yield name


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _first_ranks(job: Path, attempt: int) -> dict[str, int]:
    """The first rank of each node, by the plan that is recorded in the job's folder; it has that of one attempt."""
    try:
        with (job / "config.json").open("rb") as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
        if config["attempt"] != attempt:
            return {}
        return {node["node"]: int(node["ranks"][0]["rank"]) for node in config["plan"]["nodes"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


# --- reading them -----------------------------------------------------------------------------------------------------


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
        return [*found, *(job for job in over if find(self._folder / str(job)))]

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
        files = find(self._folder / str(job))
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
