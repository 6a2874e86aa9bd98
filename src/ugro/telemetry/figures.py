"""The last, smallest and largest value of each metric of thousands of jobs, without reading their curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ugro.core.experiment import Figure
from ugro.core.metrics import INTERNAL
from ugro.store.connection import Connection, Row

_MOST_KEYS = 100  # of one job
_COLUMNS = (
    "owner, attempt, rank, key, count, last_step, finite_value, value_min, value_max, min_step, max_step, odd_step"
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
    return {owner: {key: _figure(row) for key, (_, row) in sorted(keys.items())} for owner, keys in found.items()}


def _rows(db: Connection, owners: Sequence[str] | None) -> Iterable[Row]:
    if owners is None:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner >= 'job/' AND owner < 'job0' AND {_CHOSEN}")
        return
    for owner in owners:
        yield from db.execute(f"SELECT {_COLUMNS} FROM series WHERE owner = ? AND {_CHOSEN}", (owner,))


def _figure(row: Row) -> Figure:
    return Figure(
        row["finite_value"], row["value_min"], row["value_max"], row["last_step"], row["count"],
        row["min_step"], row["max_step"], row["odd_step"],
    )  # fmt: skip
