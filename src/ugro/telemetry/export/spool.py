"""What waits to be sent, on disk: a folder of files, the oldest first, bounded in bytes. One process writes.

Points are appended to an open file, which is sealed when it is to be sent or large enough. A sealed file's name has the
number of its points, so that what is dropped can be counted without reading it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ugro.telemetry.export.encoding import Sample

_OPEN = "open"
_SUFFIX = ".jsonl"
LARGE = 1_000_000  # bytes of a file
_LEAST_FILES = 8  # of a full spool: the oldest is dropped, and not all of it


@dataclass(frozen=True, slots=True)
class Sealed:
    path: Path
    number: int
    points: int
    size: int


class Spool:
    """Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open = folder / _OPEN
        self._sealed = list(self._found())
        self._points = self._count_open()
        self.in_use: int | None = None  # the number of the file that is being sent: it is not dropped

    @property
    def size(self) -> int:
        return sum(one.size for one in self._sealed) + self._open_size

    @property
    def points(self) -> int:
        return sum(one.points for one in self._sealed) + self._points

    def add(self, samples: Iterable[Sample], limit: int) -> int:
        """Returns how many points were dropped to stay within ``limit`` bytes. Raises OSError."""
        lines = [json.dumps(sample) + "\n" for sample in samples]
        _append(self._open, "".join(lines).encode())
        self._points += len(lines)
        if self._open_size >= min(LARGE, limit // _LEAST_FILES):
            self.seal()
        return self._keep_within(limit)

    def seal(self) -> None:
        """What was added so far can be sent."""
        size = self._open_size
        if not size:
            return
        number = self._sealed[-1].number + 1 if self._sealed else 1
        path = self._folder / f"{number:012d}-{self._points}{_SUFFIX}"
        self._open.rename(path)
        self._sealed.append(Sealed(path, number, self._points, size))
        self._points = 0

    def oldest(self) -> Sealed | None:
        return self._sealed[0] if self._sealed else None

    def read(self, sealed: Sealed) -> list[Sample]:
        """A line that was cut by a crash is left out."""
        return [sample for line in sealed.path.read_bytes().splitlines() for sample in _samples(line)]

    def remove(self, sealed: Sealed) -> None:
        """It was sent, or nobody takes it."""
        sealed.path.unlink(missing_ok=True)
        self._sealed = [one for one in self._sealed if one.number != sealed.number]

    def _keep_within(self, limit: int) -> int:
        dropped = 0
        for sealed in [one for one in self._sealed if one.number != self.in_use]:
            if self.size <= limit:
                break
            dropped += sealed.points
            self.remove(sealed)
        return dropped

    @property
    def _open_size(self) -> int:
        try:
            return self._open.stat().st_size
        except FileNotFoundError:
            return 0

    def _count_open(self) -> int:
        """A line that was cut by a crash is removed: the next would be a part of it."""
        try:
            text = self._open.read_bytes()
        except FileNotFoundError:
            return 0
        if not text.endswith(b"\n"):
            os.truncate(self._open, text.rfind(b"\n") + 1)
        return text.count(b"\n")

    def _found(self) -> Iterator[Sealed]:
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            number, _, points = path.name.removesuffix(_SUFFIX).partition("-")
            if number.isdigit() and points.isdigit():
                yield Sealed(path, int(number), int(points), path.stat().st_size)


def _append(path: Path, text: bytes) -> None:
    """All of it or nothing: a disk that is full leaves no half of a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            while text:
                text = text[os.write(descriptor, text) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _samples(line: bytes) -> Iterator[Sample]:
    with contextlib.suppress(ValueError, TypeError):
        owner, attempt, rank, key, time_ms, step, value = json.loads(line)
        yield Sample(str(owner), int(attempt), int(rank), str(key), int(time_ms), int(step), float(value))
