"""Reads curves with as many bins as a chart can show, from the coarsest stored level that has them.

A curve has a summary of all its points, each chunk one of its own, and then there are the points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ugro.store.connection import Connection, Row
from ugro.telemetry import bins as binning
from ugro.telemetry.bins import Bins
from ugro.telemetry.series import Points, SeriesKey, read_points

MOST_BINS = 2000
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


@dataclass(frozen=True, slots=True)
class KeySummary:
    owner: str
    attempt: int
    rank: int
    key: str
    count: int
    first_step: int
    last_step: int
    last_time: float
    last_value: float | None  # the last finite one; None: there is none


def read_curves(db: Connection, wanted: Wanted) -> list[Curve]:
    rows = list(_series(db, wanted, "summary"))[:MOST_SERIES]
    if not rows:
        return []
    low = wanted.first_step if wanted.first_step is not None else min(row["step_min"] for row in rows)
    high = wanted.last_step if wanted.last_step is not None else max(row["step_max"] for row in rows)
    most = min(wanted.bins, MOST_BINS, max(50, _MOST_BINS_TOGETHER // len(rows)))
    width = binning.width_for(high - low + 1, most)
    reading = _Reading(db, low, high, width, is_exact=len(rows) <= _FEW_SERIES)
    return [reading.curve(row) for row in rows]


def read_keys(db: Connection, wanted: Wanted) -> list[KeySummary]:
    return [_key_summary(row) for row in _series(db, wanted)]


def read_raw(db: Connection, wanted: Wanted) -> dict[SeriesKey, Points]:
    """Every point, in the order of steps."""
    found = {}
    for row in _series(db, wanted):
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


def _series(db: Connection, wanted: Wanted, more: str = "NULL") -> Iterator[Row]:
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
        [_finite(total / count) if count else None for total, count in zip(bins.sums, bins.counts, strict=True)],
        list(bins.counts), list(bins.odd),
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
