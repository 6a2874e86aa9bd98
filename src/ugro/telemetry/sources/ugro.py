"""``metrics.jsonl``, as ``ugro.train`` and scripts write it."""

from __future__ import annotations

from ugro.telemetry import records
from ugro.telemetry.series import Points
from ugro.telemetry.sources.reading import Key, Origin, Piece, Reading

_LOSS_OF_STEPS = "profile/loss"


def read(piece: Piece) -> Reading:
    end = _end_of_lines(piece.content)
    reading = Reading(_points(piece.content[:end].splitlines()), end=end)
    for key in [key for key in reading.points if key.name == _LOSS_OF_STEPS]:
        points = reading.points[key]
        reading.points[Key(Origin.STEPS, key.rank, "loss")] = points.cut(0)
    return reading


def _end_of_lines(content: bytes) -> int:
    """Whole lines only; the last one may be incomplete."""
    end = content.rfind(b"\n") + 1
    if not end and len(content) >= records.LONGEST_LINE:
        return len(content)  # no valid line is that long
    return end


def _points(lines: list[bytes]) -> dict[Key, Points]:
    # Nearly all lines have the same keys, so a table of them is transposed at once.
    tables: dict[tuple[int, tuple[str, ...]], list[records.Record]] = {}
    for record in records.read_all(lines):
        tables.setdefault((record.rank, tuple(record.values)), []).append(record)
    found: dict[Key, Points] = {}
    for (rank, names), table in tables.items():
        steps, times = [record.step for record in table], [record.time_ms for record in table]
        columns = zip(*(record.values.values() for record in table), strict=True)
        for name, column in zip(names, columns, strict=True):
            _add(found, Key(Origin.UGRO, rank, name), Points(list(steps), list(times), list(column)))
    return found


def _add(found: dict[Key, Points], key: Key, points: Points) -> None:
    if key in found:  # from another table: their lines alternate
        points.extend(found[key])
        order = sorted(range(len(points)), key=points.times_ms.__getitem__)
        columns = (points.steps, points.times_ms, points.values)
        points = Points(*([column[at] for at in order] for column in columns))  # type: ignore[arg-type]
    found[key] = points
