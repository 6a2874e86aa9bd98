"""The data of the experiments page: the table for a query, and links to other queries. No HTML, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import BaseModel, Field

from ugro.core.errors import UgroError
from ugro.core.experiment import Experiment
from ugro.policy.experiments.columns import FACTS, METRICS, PARAMETER, Column, columns_at_first, known_columns
from ugro.policy.experiments.filter import matching
from ugro.policy.experiments.table import BY_CONFIGURATION, BY_NAME, Line, Page, Position, SortOrder, lines, page

SIZE = 100
MOST_COMPARED = 1000
_IN_FRONT = ("id", "name")  # the first column of every line
_MOST_GROUPS = 30
Text = Annotated[str, Field(max_length=2000)]


class TableQuery(BaseModel):
    """The query of /experiments. Unknown parameters are ignored."""

    q: Text = ""
    sort: Text = ""
    column: Annotated[list[Text], Field(max_length=60)] = Field(default_factory=list)
    group: Text = ""
    after: Text = ""
    before: Text = ""
    all: bool = False  # also jobs without metrics, note and tags

    def link(self, **changes: Any) -> str:
        """The address of the same table with some changes, from its first page."""
        kept = self.model_dump(exclude={"after", "before"}) | {"all": "1" if self.all else ""} | changes
        query = urlencode({key: value for key, value in kept.items() if value}, doseq=True)
        return f"/experiments?{query}" if query else "/experiments"


@dataclass(frozen=True, slots=True)
class Head:
    column: Column
    label: str
    link: str
    direction: str  # for aria-sort
    is_number: bool


@dataclass(frozen=True, slots=True)
class Table:
    heads: tuple[Head, ...]
    page: Page
    order: SortOrder
    found: int  # experiments that match
    known: int  # all experiments
    problem: UgroError | None
    choices: Mapping[str, Sequence[Column]]
    groups: Sequence[tuple[str, str]]

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(str(head.column) for head in self.heads)


def table(wanted: TableQuery, everything: Sequence[Experiment], now: float) -> Table:
    candidates = [one for one in everything if wanted.all or one.figures or one.note or one.tags]
    problem: UgroError | None = None
    try:
        found = matching(candidates, wanted.q, now)
        order = SortOrder.parse(wanted.sort) if wanted.sort else SortOrder()
        columns = [Column.parse(text) for text in wanted.column] or columns_at_first(found)
        shown = page(lines(found, wanted.group), order, now, Position(wanted.after, wanted.before, SIZE))
    except UgroError as error:
        problem, found, order, columns = error, [], SortOrder(), [Column("state")]
        shown = page([], order, now, Position())
    heads = [_head(wanted, column, order, shown, now) for column in columns if column.kind not in _IN_FRONT]
    known = known_columns(candidates)
    return Table(tuple(heads), shown, order, len(found), len(candidates), problem, _choices(known), _groups(known))


def comparable(words: str, everything: Sequence[Experiment], now: float) -> list[int]:
    """The newest experiments that match a filter, at most ``MOST_COMPARED``; ``*`` matches all."""
    found = matching([one for one in everything if one.figures], "" if words == "*" else words, now)
    return [one.id for one in found[-MOST_COMPARED:]]


def states(line: Line) -> list[tuple[str, int]]:
    return Counter(one.state.value for one in line.members).most_common()


def tags(line: Line) -> list[str]:
    return list(dict.fromkeys(tag for one in line.members for tag in one.tags))


def jobs_of(line: Line) -> str:
    return ",".join(str(one.id) for one in line.members[:MOST_COMPARED])


def sort_link(wanted: TableQuery, kind: str, order: SortOrder) -> str:
    """The link that sorts by a column. A second click reverses the order; numbers start with the largest."""
    is_here = str(order.column) == kind
    is_falling = not order.is_falling if is_here else kind.partition(":")[0] not in (*_RISING, PARAMETER)
    return wanted.link(sort=f"-{kind}" if is_falling else kind)


_RISING = ("name", "state", "user", "tags", "note", "min", "best")


def _head(wanted: TableQuery, column: Column, order: SortOrder, shown: Page, now: float) -> Head:
    name = str(column)
    direction = "none"
    if str(order.column) == name:
        direction = "descending" if order.is_falling else "ascending"
    cells = [line.cell(column, now) for line in shown.lines]
    is_number = column.kind != "submitted" and any(value is not None for value in cells)
    is_number = is_number and not any(isinstance(value, str) for value in cells)
    return Head(column, column.label, sort_link(wanted, name, order), direction, is_number)


def _choices(known: Sequence[Column]) -> dict[str, list[Column]]:
    return {
        "facts": [column for column in known if column.kind in FACTS and column.kind not in _IN_FRONT],
        "parameters": [column for column in known if column.kind == PARAMETER],
        "metrics": [column for column in known if column.kind in METRICS],
    }


def _groups(known: Sequence[Column]) -> list[tuple[str, str]]:
    names = [column.key for column in known if column.kind == PARAMETER][:_MOST_GROUPS]
    fixed = [("", "nothing"), (BY_CONFIGURATION, "configuration, all but the seed"), (BY_NAME, "name")]
    return fixed + [(name, f"parameter {name}") for name in names]
