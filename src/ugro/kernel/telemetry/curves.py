"""Reads curves with as many bins as a chart can show, from the coarsest stored level that has them.

A curve has a summary of all its points, each chunk one of its own, and then there are the points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.telemetry import bins as binning
from ugro.kernel.telemetry.bins import Bins, pack_real, pack_whole, unpack_real, unpack_whole
from ugro.kernel.telemetry.model import MOST_BINS, KeySummary

# --- the tables of curves ---------------------------------------------------------------------------------------------
# The tables of the metric store: appending points to curves, and putting them into chunks. SQL stays here.
#
# Points that come are kept as they come, in loose chunks. When there are enough of them they are sealed: put in order,
# summarised, and counted into their curve's summary.


CHUNK = 4096
MOST_SUMMARY_BINS = 512
_CHUNK_BINS = 64
_MOST_LOOSE_CHUNKS = 32


class SeriesKey(NamedTuple):
    """A curve: its owner (``job/17``, ``node/gpu1``) and its own name."""

    owner: str
    attempt: int
    rank: int
    key: str


@dataclass(slots=True)
class Points:
    steps: list[int] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def cut(self, begin: int, end: int | None = None) -> Points:
        return Points(self.steps[begin:end], self.times_ms[begin:end], self.values[begin:end])

    def extend(self, other: Points) -> None:
        self.steps += other.steps
        self.times_ms += other.times_ms
        self.values += other.values

    def in_order(self) -> Points:
        """Sorted by step, stable."""
        steps = self.steps
        if all(map(int.__le__, steps, steps[1:])):
            return self
        order = sorted(range(len(steps)), key=steps.__getitem__)
        times, values = self.times_ms, self.values
        return Points([steps[at] for at in order], [times[at] for at in order], [values[at] for at in order])

    def bins(self, width: int) -> Bins:
        return binning.of_points(self.steps, self.times_ms, self.values, width)


def append(db: Connection, key: SeriesKey, points: Points, origin: int = 0) -> None:
    """Of several origins with the same name, only the one with the smallest number is kept."""
    if not points:
        return
    number, loose, loose_chunks, known = _series(db, key, origin)
    if origin > known:
        return
    if origin < known:
        db.execute("DELETE FROM chunk WHERE series = ?", (number,))
        db.execute("DELETE FROM series WHERE id = ?", (number,))
        number, loose, loose_chunks, _ = _series(db, key, origin)
    _note_points(db, number, points)
    if loose + len(points) >= CHUNK:
        whole = take_loose(db, number) if loose else Points()
        whole.extend(points)
        left = len(whole) % CHUNK
        _seal(db, number, whole, len(whole) - left)
        loose, loose_chunks, points = 0, 0, whole.cut(len(whole) - left)
    elif loose_chunks >= _MOST_LOOSE_CHUNKS:
        whole = take_loose(db, number)
        whole.extend(points)
        loose, loose_chunks, points = 0, 0, whole
    if points:
        _insert(db, number, points)
        loose, loose_chunks = loose + len(points), loose_chunks + 1
    db.execute("UPDATE series SET loose = ?, loose_chunks = ? WHERE id = ?", (loose, loose_chunks, number))


def seal(db: Connection, owner: str) -> None:
    """The owner is complete: its curves are compacted for fast reading."""
    for row in db.execute("SELECT id FROM series WHERE owner = ? AND loose_chunks > 0", (owner,)).fetchall():
        loose = take_loose(db, row["id"])
        _seal(db, row["id"], loose, len(loose))
        db.execute("UPDATE series SET loose = 0, loose_chunks = 0 WHERE id = ?", (row["id"],))


def take_loose(db: Connection, series: int) -> Points:
    points = read_points(db.execute("SELECT * FROM chunk WHERE series = ? AND is_sealed = 0 ORDER BY id", (series,)))
    db.execute("DELETE FROM chunk WHERE series = ? AND is_sealed = 0", (series,))
    return points


def read_points(rows: Iterable[Row]) -> Points:
    points = Points()
    for row in rows:
        points.steps += unpack_whole(row["steps"])
        points.times_ms += unpack_whole(row["times"])
        points.values += unpack_real(row["points"])
    return points


def forget_before(db: Connection, owner: str, step: int) -> None:
    """Drops chunks that end before that step, and rebuilds the summaries."""
    query = (
        "SELECT DISTINCT series FROM chunk JOIN series ON series.id = chunk.series "
        "WHERE owner = ? AND chunk.step_max < ?"
    )
    for row in db.execute(query, (owner, step)).fetchall():
        number = row["series"]
        db.execute("DELETE FROM chunk WHERE series = ? AND step_max < ?", (number, step))
        _summarise_again(db, number)


def _summarise_again(db: Connection, number: int) -> None:
    rows = db.execute("SELECT * FROM chunk WHERE series = ?", (number,)).fetchall()
    sealed = [row for row in rows if row["is_sealed"]]
    parts = [binning.unpack(row["bins"]) if row["bins"] else read_points([row]).bins(1) for row in sealed]
    loose = [row for row in rows if not row["is_sealed"]]
    db.execute(
        "UPDATE series SET summary = ?, count = ?, loose = ?, loose_chunks = ?, step_min = ? WHERE id = ?",
        (
            _bounded(binning.together(parts, 1)).pack() if any(row["bins"] for row in sealed) else None,
            sum(row["count"] for row in rows),
            sum(row["count"] for row in loose),
            len(loose),
            min((row["step_min"] for row in rows), default=None),
            number,
        ),
    )


def count_found(db: Connection, owner: str) -> int:
    """How many curves come from files of other libraries."""
    return int(db.execute("SELECT COUNT(*) FROM series WHERE owner = ? AND origin > 0", (owner,)).fetchone()[0])


def has(db: Connection, key: SeriesKey) -> bool:
    return db.execute(f"SELECT 1 FROM series WHERE {_PLACE}", _place(key)).fetchone() is not None


_PLACE = "owner = ? AND key = ? AND attempt = ? AND rank = ?"


def _place(key: SeriesKey) -> tuple[str, str, int, int]:
    return key.owner, key.key, key.attempt, key.rank


def _series(db: Connection, key: SeriesKey, origin: int) -> tuple[int, int, int, int]:
    """Its number, how many points and chunks are loose, and where its points come from."""
    query = f"SELECT id, loose, loose_chunks, origin FROM series WHERE {_PLACE}"
    row = db.execute(query, _place(key)).fetchone()
    if row is not None:
        return row["id"], row["loose"], row["loose_chunks"], row["origin"]
    insert = "INSERT INTO series (owner, key, attempt, rank, origin) VALUES (?, ?, ?, ?, ?) RETURNING id"
    return int(db.execute(insert, (*_place(key), origin)).fetchone()["id"]), 0, 0, origin


def _note_points(db: Connection, number: int, points: Points) -> None:
    """What tables of jobs show: they read no points."""
    finite = _finite(points.values)
    least, most = min(finite, default=None), max(finite, default=None)
    # Not kept if older points were not counted: then readers use the bins.
    db.execute(
        "UPDATE series SET count = count + :count, step_min = MIN(COALESCE(step_min, :low), :low), "
        "step_max = MAX(COALESCE(step_max, :high), :high), "
        "last_time_ms = :last, last_step = :step, last_value = :value, "
        "finite_value = COALESCE(:finite, finite_value), "
        "odd_step = CASE WHEN :finite IS NULL THEN COALESCE(odd_step, :odd) ELSE :odd END, "
        "min_step = CASE WHEN count = 0 OR :least < value_min THEN :least_step ELSE min_step END, "
        "max_step = CASE WHEN count = 0 OR :most > value_max THEN :most_step ELSE max_step END, "
        "value_min = CASE WHEN count = 0 THEN :least ELSE MIN(value_min, COALESCE(:least, value_min)) END, "
        "value_max = CASE WHEN count = 0 THEN :most ELSE MAX(value_max, COALESCE(:most, value_max)) END "
        "WHERE id = :number",
        {
            "count": len(points),
            "low": min(points.steps),
            "high": max(points.steps),
            "last": points.times_ms[-1],
            "step": points.steps[-1],
            "value": points.values[-1],
            "finite": finite[-1] if finite else None,
            "odd": _odd_from(points),
            "least": least,
            "most": most,
            "least_step": None if least is None else points.steps[points.values.index(least)],
            "most_step": None if most is None else points.steps[points.values.index(most)],
            "number": number,
        },
    )


def _odd_from(points: Points) -> int | None:
    """The step from which on all values are NaN or infinite; None if the last one is finite."""
    found = None
    for step, value in zip(reversed(points.steps), reversed(points.values), strict=True):
        if math.isfinite(value):
            break
        found = step
    return found


def _finite(values: Sequence[float]) -> Sequence[float]:
    if math.isfinite(sum(values)):  # nearly always; a sum of finite values may be infinite
        return values
    return [value for value in values if math.isfinite(value)]


def _seal(db: Connection, number: int, points: Points, end: int) -> None:
    """The first ``end`` points."""
    parts = _sealed_so_far(db, number)
    for begin in range(0, end, CHUNK):
        piece = points.cut(begin, min(begin + CHUNK, end)).in_order()
        _insert(db, number, piece, is_sealed=True)
        parts.append(piece.bins(binning.width_for(piece.steps[-1] - piece.steps[0] + 1, MOST_SUMMARY_BINS)))
        if len(parts) > _CHUNK_BINS:
            parts = [_bounded(binning.together(parts, 1))]
    # For a few points, the points themselves are the summary.
    if sum(sum(part.counts) + sum(part.odd) for part in parts) > MOST_SUMMARY_BINS:
        summary = _bounded(binning.together(parts, 1))
        db.execute("UPDATE series SET summary = ? WHERE id = ?", (summary.pack(), number))


def _sealed_so_far(db: Connection, number: int) -> list[Bins]:
    row = db.execute("SELECT summary FROM series WHERE id = ?", (number,)).fetchone()
    if row["summary"]:
        return [binning.unpack(row["summary"])]
    few = db.execute("SELECT * FROM chunk WHERE series = ? AND is_sealed = 1", (number,))
    return [read_points([chunk]).bins(1) for chunk in few]


def _insert(db: Connection, series: int, points: Points, *, is_sealed: bool = False) -> None:
    low, high = min(points.steps), max(points.steps)
    summary = None
    if is_sealed and len(points) > MOST_SUMMARY_BINS:
        summary = points.bins(binning.width_for(high - low + 1, _CHUNK_BINS)).pack()
    columns = (pack_whole(points.steps), pack_whole(points.times_ms), pack_real(points.values))
    db.execute(
        "INSERT INTO chunk (series, is_sealed, count, step_min, step_max, bins, steps, times, points) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (series, is_sealed, len(points), low, high, summary, *columns),
    )


def _bounded(summary: Bins) -> Bins:
    while len(summary) > MOST_SUMMARY_BINS:
        summary = binning.together([summary], summary.width * 2)
    return summary


def owners_by_age(db: Connection, kind: str) -> Sequence[tuple[str, int]]:
    """Owners with that prefix and the time of their last point, the oldest first."""
    query = (
        "SELECT owner, MAX(last_time_ms) AS last FROM series WHERE owner >= ? AND owner < ? "
        "GROUP BY owner ORDER BY last"
    )
    return [(row["owner"], row["last"] or 0) for row in db.execute(query, (kind, kind + "\U0010ffff"))]


# --- reading curves ---------------------------------------------------------------------------------------------------


MOST_SERIES = 5000
_MOST_BINS_TOGETHER = 100_000  # bounds the size of an answer
_FEW_SERIES = 32  # up to which points are read if the summary is too coarse


@dataclass(frozen=True, slots=True)
class Wanted:
    owners: tuple[str, ...]
    keys: tuple[str, ...] = ()  # none: all
    attempt: int | None = None
    rank: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    bins: int = 300


@dataclass(frozen=True, slots=True)
class Curve:
    """Columns of equal length. A bin without a finite value has no least, largest and mean, and is counted in odd."""

    owner: str
    attempt: int
    rank: int
    key: str
    count: int  # points, of the whole curve
    width: int  # steps that a bin spans
    steps: list[int]  # the first of each bin
    times: list[float]  # unix seconds of each bin's first point
    lows: Sequence[float | None]
    highs: Sequence[float | None]
    means: Sequence[float | None]
    counts: list[int]
    odd: list[int]  # NaN and infinities

    @property
    def mean(self) -> float | None:
        """Of all its finite points."""
        whole = sum(self.counts)
        parts = [mean * (n / whole) for mean, n in zip(self.means, self.counts, strict=True) if mean is not None]
        return math.fsum(parts) if parts else None


def read_curves(db: Connection, wanted: Wanted) -> list[Curve]:
    rows = list(_curves_series(db, wanted, "summary"))[:MOST_SERIES]
    if not rows:
        return []
    low = wanted.first_step if wanted.first_step is not None else min(row["step_min"] for row in rows)
    high = wanted.last_step if wanted.last_step is not None else max(row["step_max"] for row in rows)
    most = min(wanted.bins, MOST_BINS, max(50, _MOST_BINS_TOGETHER // len(rows)))
    width = binning.width_for(high - low + 1, most)
    reading = _Reading(db, low, high, width, is_exact=len(rows) <= _FEW_SERIES)
    return [reading.curve(row) for row in rows]


def read_keys(db: Connection, wanted: Wanted) -> list[KeySummary]:
    return [_key_summary(row) for row in _curves_series(db, wanted)]


def read_raw(db: Connection, wanted: Wanted) -> dict[SeriesKey, Points]:
    """Every point, in the order of steps."""
    found = {}
    for row in _curves_series(db, wanted):
        points = read_points(db.execute("SELECT * FROM chunk WHERE series = ? ORDER BY id", (row["id"],)))
        found[SeriesKey(row["owner"], row["attempt"], row["rank"], row["key"])] = points.in_order()
    return found


@dataclass(frozen=True, slots=True)
class _Reading:
    db: Connection
    low: int
    high: int
    width: int
    is_exact: bool

    def curve(self, row: Row) -> Curve:
        whole = binning.together(self._parts(row), self.width)
        return _curve(row, self._within(whole))

    def _parts(self, row: Row) -> Iterator[Bins]:
        summary = binning.unpack(row["summary"]) if row["summary"] else None
        if summary is None:
            yield from self._chunks(row["id"], "")
        elif summary.width <= self.width or not self.is_exact:
            yield summary
            if row["loose"]:
                yield from self._chunks(row["id"], "AND is_sealed = 0")
        else:
            # The points of this job were removed to save space; only the summary is left.
            yield from list(self._chunks(row["id"], "")) or [summary]

    def _chunks(self, series: int, more: str) -> Iterator[Bins]:
        query = f"SELECT id, bins FROM chunk WHERE series = ? AND step_max >= ? AND step_min <= ? {more} ORDER BY id"
        loose = Points()
        for row in self.db.execute(query, (series, self.low, self.high)).fetchall():
            bins = binning.unpack(row["bins"]) if row["bins"] else None
            if bins is not None and bins.width <= self.width:
                yield bins
                continue
            points = read_points(self.db.execute("SELECT * FROM chunk WHERE id = ?", (row["id"],)))
            loose.extend(points)
        if loose:
            yield loose.in_order().bins(self.width)

    def _within(self, bins: Bins) -> Bins:
        begin = next((at for at, number in enumerate(bins.numbers) if (number + 1) * bins.width > self.low), len(bins))
        end = len(bins)
        while end > begin and bins.numbers[end - 1] * bins.width > self.high:
            end -= 1
        if begin == 0 and end == len(bins):
            return bins
        return Bins(
            bins.width, bins.numbers[begin:end], bins.lows[begin:end], bins.highs[begin:end], bins.sums[begin:end],
            bins.counts[begin:end], bins.odd[begin:end], bins.times_ms[begin:end],
        )  # fmt: skip


def _curves_series(db: Connection, wanted: Wanted, more: str = "NULL") -> Iterator[Row]:
    clauses, values = [], []
    for column, value in (("attempt", wanted.attempt), ("rank", wanted.rank)):
        if value is not None:
            clauses.append(f"AND {column} = ?")
            values.append(value)
    if wanted.keys:
        clauses.append(f"AND key IN ({','.join('?' * len(wanted.keys))})")
    query = (
        "SELECT id, owner, attempt, rank, key, count, loose, step_min, step_max, last_time_ms, last_value, "
        "finite_value, "
        f"{more} AS summary FROM series WHERE owner = ? AND count > 0 {' '.join(clauses)} ORDER BY key, attempt, rank"
    )
    for owner in wanted.owners:
        yield from db.execute(query, (owner, *values, *wanted.keys))


def _key_summary(row: Row) -> KeySummary:
    return KeySummary(
        row["owner"], row["attempt"], row["rank"], row["key"], row["count"], row["step_min"], row["step_max"],
        row["last_time_ms"] / 1000, row["finite_value"],
    )  # fmt: skip


def _curve(row: Row, bins: Bins) -> Curve:
    width = bins.width
    is_plain = all(bins.counts)
    lows: Sequence[float | None] = bins.lows.tolist()
    highs: Sequence[float | None] = bins.highs.tolist()
    if not is_plain:
        lows = [low if count else None for low, count in zip(lows, bins.counts, strict=True)]
        highs = [high if count else None for high, count in zip(highs, bins.counts, strict=True)]
    return Curve(
        row["owner"], row["attempt"], row["rank"], row["key"], row["count"], width,
        [number * width for number in bins.numbers],
        [time_ms / 1000 for time_ms in bins.times_ms],
        lows, highs,
        [_curves_finite(total / count) if count else None for total, count in zip(bins.sums, bins.counts, strict=True)],
        list(bins.counts), list(bins.odd),
    )  # fmt: skip


def _curves_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
