"""A bar: UGRO takes at most a given share of the time that a peer took in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bar:
    claim: str
    ours_s: float
    peer_s: float
    peer: str
    share: float

    @property
    def ratio(self) -> float:
        return self.ours_s / self.peer_s

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.share

    def line(self) -> str:
        verdict = "ok    " if self.is_met else "MISSED"
        return f"{verdict} {self.claim}: {self.ratio:.3f} of {self.peer} (bar {self.share:.3f})"


@dataclass(slots=True)
class Row:
    """One measured case, repeated in turn with the others of its table."""

    name: str
    seconds: list[float] = field(default_factory=list)
    remark: str = ""  # shown instead of figures when there are none

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)


def print_rows(title: str, rows: Iterable[Row]) -> None:
    print(f"{title:<48}{'fastest, s':>12}{'median, s':>12}{'repeats':>9}")
    for row in rows:
        figures = f"{row.min_s:>12.4f}{row.median_s:>12.4f}{len(row.seconds):>9}" if row.seconds else ""
        print(f"{row.name:<48}{figures}  {row.remark}".rstrip())
    print()


def fastest(rows: Sequence[Row]) -> Row | None:
    return min((row for row in rows if row.seconds), key=lambda row: row.median_s, default=None)
