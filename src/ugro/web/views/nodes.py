"""The nodes on the cluster page: a table and, for many nodes, a map and pages of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Query

from ugro.agent.api.responses import Body
from ugro.core.node import Status, by_name
from ugro.web.views.overview import NodeRow, chosen

MANY = 24  # with more nodes there is a map
PAGE = 50
LEVELS = 5  # of use, besides none
_ASLEEP = (Status.WAKING, Status.GOING_TO_SLEEP, Status.ASLEEP)
_WORST = (
    *(Status.UNREACHABLE, Status.UNHEALTHY, Status.DEGRADED, "unknown", "late", "drained", "owner"),
    *(*_ASLEEP, Status.HEALTHY),
)


class NodesQuery(Body):
    q: Annotated[str, Query(max_length=200)] = ""
    status: Annotated[str, Query(max_length=20)] = ""
    sort: Annotated[Literal["", "worst", "use", "name"], Query()] = ""  # default: the worst first if there are many
    page: Annotated[int, Query(ge=1, le=10**6)] = 1

    def link(self, page: int) -> str:
        given = {"q": self.q, "status": self.status, "sort": self.sort, "page": page if page > 1 else ""}
        return "/?" + urlencode({key: value for key, value in given.items() if value})


@dataclass(frozen=True, slots=True)
class NodeTable:
    rows: list[NodeRow]  # of this page
    squares: list[NodeRow]  # all that match, by name; empty without a map
    counts: dict[str, int]  # of those, by status word
    first: int  # number of the first row
    found: int
    before: str | None  # links to other pages
    after: str | None


def node_table(rows: Sequence[NodeRow], wanted: NodesQuery) -> NodeTable:
    """``rows`` are sorted by name."""
    has_map = len(rows) > MANY
    found = chosen(rows, wanted.q, wanted.status)
    last = max(1, -(-len(found) // PAGE))
    page = min(wanted.page, last)  # the table may have become shorter
    begin = (page - 1) * PAGE
    return NodeTable(
        rows=_sorted(found, wanted.sort or ("worst" if has_map else "name"))[begin : begin + PAGE],
        squares=found if has_map else [],
        counts=_counts(found),
        first=begin + 1,
        found=len(found),
        before=wanted.link(page - 1) if page > 1 else None,
        after=wanted.link(page + 1) if page < last else None,
    )


def word(row: NodeRow) -> str:
    """The status word of a node on the map; ``_WORST`` has the order."""
    if row.status != Status.HEALTHY:
        return row.status
    if row.drained is not None:
        return "drained"
    return "late" if row.is_late else "owner" if row.owner else Status.HEALTHY


def said(word: str) -> str:
    return "owner is there" if word == "owner" else word


def level(row: NodeRow) -> int:
    """How much of the node is in use: 0 for nothing, then in equal steps."""
    return 0 if row.load is None or row.load < 0.01 else min(LEVELS, 1 + int(row.load * LEVELS))


def _sorted(rows: Sequence[NodeRow], by: str) -> list[NodeRow]:
    if by == "name":
        return list(rows)
    if by == "use":
        return sorted(rows, key=lambda row: (-1.0 if row.load is None else row.load, by_name(row.name)), reverse=True)
    return sorted(rows, key=lambda row: (_WORST.index(word(row)), by_name(row.name)))


def _counts(rows: Sequence[NodeRow]) -> dict[str, int]:
    counts = Counter(map(word, rows))
    return {one: counts[one] for one in _WORST if counts[one]}
