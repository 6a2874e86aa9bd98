"""``metrics.jsonl``, as ``ugro.train`` and scripts write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ugro.telemetry import records
from ugro.telemetry.series import Points
from ugro.telemetry.sources.reading import Key, Origin, Piece, Reading

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
