"""The last, smallest and largest value of each metric of thousands of jobs, without reading their curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ugro.core.experiment import Figure
from ugro.core.metrics import INTERNAL
from ugro.store.connection import Connection, Row
from ugro.telemetry import bins as binning
from ugro.telemetry.series import read_points

_MOST_KEYS = 100  # of one job
_COLUMNS = (
    "id, owner, attempt, rank, key, count, last_step, last_value, finite_value, value_min, value_max, "
    "min_step, max_step, odd_step"
)
_CHOSEN = "count > 0" + "".join(f" AND substr(key, 1, {len(one)}) <> '{one}'" for one in INTERNAL)


def read_figures(
    db: Connection, owners: Sequence[str] | None, attempt: int | None = None
) -> dict[str, dict[str, Figure]]:
    """By owner and key: of the newest attempt and the first rank that have it; no later attempt than the given one.

    ``None``: of all jobs.
    """
    found: dict[str, dict[str, tuple[tuple[int, int], Row]]] = {}
    for row in _rows(db, owners):
        if attempt is not None and row["attempt"] > attempt:
            continue
        keys = found.setdefault(row["owner"], {})
        order = (row["attempt"], -row["rank"])
        known = keys.get(row["key"])
        if known[0] < order if known is not None else len(keys) < _MOST_KEYS:
            keys[row["key"]] = (order, row)
    return {owner: {key: _figure(db, row) for key, (_, row) in sorted(keys.items())} for owner, keys in found.items()}


def _rows(db: Connection, owners: Sequence[str] | None) -> Iterable[Row]:
    if owners is None:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner >= 'job/' AND owner < 'job0' AND {_CHOSEN}")
        return
    for owner in owners:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner = ? AND {_CHOSEN}", (owner,))


def _figure(db: Connection, row: Row) -> Figure:
    least, most, steps = row["value_min"], row["value_max"], (row["min_step"], row["max_step"])
    if least is None:
        (least, most), steps = _bounds(db, row["id"]), (None, None)
    return Figure(last_finite(row), least, most, row["last_step"], row["count"], *steps, row["odd_step"])


def last_finite(row: Row) -> float | None:
    """What ``last`` means everywhere: the last finite value that was written."""
    last = row["finite_value"] if row["finite_value"] is not None else row["last_value"]  # of an older version
    return last if last is not None and math.isfinite(last) else None


def _bounds(db: Connection, series: int) -> tuple[float | None, float | None]:
    """For a curve that is older than these figures, or has no finite value."""
    row = db.execute("SELECT summary FROM series WHERE id = ?", (series,)).fetchone()
    parts = [binning.unpack(row["summary"])] if row["summary"] else []
    more = "AND is_sealed = 0" if parts else ""
    chunks = db.execute(f"SELECT * FROM chunk WHERE series = ? {more}", (series,))
    parts += [read_points([chunk]).in_order().bins(1 << 40) for chunk in chunks]
    lows = [low for part in parts for low in part.lows if math.isfinite(low)]
    highs = [high for part in parts for high in part.highs if math.isfinite(high)]
    return (min(lows), max(highs)) if lows else (None, None)
