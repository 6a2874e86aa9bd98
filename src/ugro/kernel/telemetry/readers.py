"""What every reader of metrics is given, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from ugro.features.trackers.tfevents import Scalar
from ugro.kernel.telemetry import rules as records
from ugro.kernel.telemetry.curves import Points

AT_ONCE = 4 << 20  # bytes of one file per step; about as much of many files is one transaction
LARGEST = 1 << 53
_LONGEST_NAME = 200
_LONGEST_VALUE = 200
_MOST_PARAMETERS = 200


class Origin(IntEnum):
    """Where a curve comes from. If several have the same name, the one with the smallest number is shown."""

    UGRO = 0
    TENSORBOARD = 1
    WANDB = 2
    STEPS = 3  # the mean loss of all ranks, which ``ugro.train`` measures; for scripts that log none


class Key(NamedTuple):
    origin: Origin
    rank: int | None  # None: the reader does not know
    name: str


class Piece(NamedTuple):
    """A part of a file that has not been read yet."""

    content: bytes
    offset: int  # where it begins
    size: int  # of the whole file
    state: str  # what the last read left for this one


@dataclass(slots=True)
class Reading:
    points: dict[Key, Points] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    end: int = 0  # how much of the piece is done; the rest is read again when the file has grown
    state: str = ""
    has_cut: bool = False  # a line was too long to be read

    def add(self, origin: Origin, name: str, step: int, time_s: float, value: float) -> None:
        """Skips what cannot be shown: too long names, impossible steps."""
        if not is_name(name) or not -LARGEST < step < LARGEST:
            return
        points = self.points.get(key := Key(origin, None, name))
        if points is None:
            points = self.points[key] = Points()
        points.steps.append(step)
        points.times_ms.append(milliseconds(time_s))
        points.values.append(value)

    def add_all(self, origin: Origin, name: str, scalars: Iterable[Scalar]) -> None:
        if is_name(name):
            known = [one for one in scalars if -LARGEST < one.step < LARGEST]
            steps, values = [one.step for one in known], [one.value for one in known]
            if known:
                self.points[Key(origin, None, name)] = Points(
                    steps, [milliseconds(one.time_unix) for one in known], values
                )

    def add_parameters(self, given: Iterable[tuple[str, str]]) -> None:
        for name, value in given:
            if is_name(name) and len(self.parameters) < _MOST_PARAMETERS:
                self.parameters[name] = "".join(filter(str.isprintable, value[:_LONGEST_VALUE]))


Read = Callable[[Piece], Reading]


def is_name(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable()


def milliseconds(time_s: float) -> int:
    """Zero for an impossible time."""
    return int(time_s * 1000) if math.isfinite(time_s) and 0 <= time_s < LARGEST / 1000 else 0


def real(value: object) -> float | None:
    """A number of a JSON document."""
    if type(value) is float:
        return value
    return float(value) if type(value) is int and -LARGEST < value < LARGEST else None


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------
# ``ugro.train`` and scripts write it.


_LOSS_OF_STEPS = "profile/loss"


def read(piece: Piece) -> Reading:
    end = _end_of_lines(piece.content)
    lines = piece.content[:end].splitlines()
    kept = [line for line in lines if len(line) <= records.LONGEST_LINE]
    reading = Reading(_points(kept), end=end, has_cut=len(kept) < len(lines))
    for key in [key for key in reading.points if key.name == _LOSS_OF_STEPS]:
        points = reading.points[key]
        reading.points[Key(Origin.STEPS, key.rank, "loss")] = points.cut(0)
    return reading


def _end_of_lines(content: bytes) -> int:
    """Whole lines only; the last one may be incomplete."""
    end = content.rfind(b"\n") + 1
    if not end and len(content) > records.LONGEST_LINE:
        return len(content)  # no valid line is that long
    return end


def _points(lines: list[bytes]) -> dict[Key, Points]:
    # Nearly all lines have the same keys, so a table of them is transposed at once.
    tables: dict[tuple[int, tuple[str, ...]], _Table] = {}
    for place, record in enumerate(records.read_all(lines)):
        table = tables.setdefault((record.rank, tuple(record.values)), _Table())
        table.places.append(place)
        table.records.append(record)
    found: dict[Key, Points] = {}
    places: dict[Key, list[int]] = {}
    for (rank, names), table in tables.items():
        for name, points in table.columns(names):
            key = Key(Origin.UGRO, rank, name)
            if key in found:  # from another table: their lines alternate
                _merge(found[key], places[key], points, table.places)
            else:
                found[key], places[key] = points, list(table.places)
    return found


@dataclass(slots=True)
class _Table:
    places: list[int] = field(default_factory=list)  # of its records among all
    records: list[records.Record] = field(default_factory=list)

    def columns(self, names: Sequence[str]) -> Iterator[tuple[str, Points]]:
        steps, times = [record.step for record in self.records], [record.time_ms for record in self.records]
        columns = zip(*(record.values.values() for record in self.records), strict=True)
        for name, column in zip(names, columns, strict=True):
            yield name, Points(list(steps), list(times), list(column))


def _merge(points: Points, places: list[int], more: Points, more_places: Sequence[int]) -> None:
    """In the order of their lines: the last one is the last value."""
    points.extend(more)
    places += more_places
    order = sorted(range(len(places)), key=places.__getitem__)
    points.values[:] = [points.values[at] for at in order]
    for column in (points.steps, points.times_ms, places):
        column[:] = [column[at] for at in order]
