"""The last, smallest and largest value of each metric of thousands of jobs, without reading their curves."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence

from ugro.core.experiment import Figure
from ugro.telemetry import bins as binning
from ugro.telemetry.series import read_points

_MOST_KEYS = 100  # of one job
_COLUMNS = "id, owner, attempt, rank, key, count, last_step, last_value, value_min, value_max"
# Per-step measurements of each rank are shown on a job's own page only.
_CHOSEN = "count > 0 AND NOT (key >= 'profile/' AND key < 'profile0')"


def read_figures(db: sqlite3.Connection, owners: Sequence[str] | None) -> dict[str, dict[str, Figure]]:
    """By owner and key: of its newest attempt, and of the first rank that has it. ``None``: of all jobs."""
    found: dict[str, dict[str, tuple[tuple[int, int], sqlite3.Row]]] = {}
    for row in _rows(db, owners):
        keys = found.setdefault(row["owner"], {})
        order = (row["attempt"], -row["rank"])
        known = keys.get(row["key"])
        if known[0] < order if known is not None else len(keys) < _MOST_KEYS:
            keys[row["key"]] = (order, row)
    return {
        owner: {key: _figure(db, row) for key, (_, row) in sorted(keys.items())} for owner, keys in found.items()
    }


def _rows(db: sqlite3.Connection, owners: Sequence[str] | None) -> Iterable[sqlite3.Row]:
    if owners is None:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner >= 'job/' AND owner < 'job0' AND {_CHOSEN}")
        return
    for owner in owners:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner = ? AND {_CHOSEN}", (owner,))


def _figure(db: sqlite3.Connection, row: sqlite3.Row) -> Figure:
    least, most = row["value_min"], row["value_max"]
    if least is None:
        least, most = _bounds(db, row["id"])
    last = row["last_value"]
    is_finite = last is not None and math.isfinite(last)
    return Figure(last if is_finite else None, least, most, row["last_step"], row["count"])


def _bounds(db: sqlite3.Connection, series: int) -> tuple[float | None, float | None]:
    """For a curve that is older than these figures, or has no finite value."""
    row = db.execute("SELECT summary FROM series WHERE id = ?", (series,)).fetchone()
    parts = [binning.unpack(row["summary"])] if row["summary"] else []
    more = "AND is_sealed = 0" if parts else ""
    chunks = db.execute(f"SELECT * FROM chunk WHERE series = ? {more}", (series,))
    parts += [read_points([chunk]).in_order().bins(1 << 40) for chunk in chunks]
    lows = [low for part in parts for low in part.lows if math.isfinite(low)]
    highs = [high for part in parts for high in part.highs if math.isfinite(high)]
    return (min(lows), max(highs)) if lows else (None, None)
