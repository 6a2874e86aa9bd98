"""The data of the experiments page: the table for a query, and links to other queries. No HTML, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import BaseModel, Field

from ugro.features.experiments.rules.comparison import METRIC, Row
from ugro.features.experiments.rules.table import (
    BY_CONFIGURATION,
    BY_NAME,
    FACTS,
    METRICS,
    PARAMETER,
    Column,
    Line,
    Page,
    Position,
    SortOrder,
    columns_at_first,
    groups_of,
    known_columns,
    lines,
    matching,
    metric_order,
    page,
)
from ugro.kernel.support.errors import UgroError, UsageError
from ugro.kernel.support.quantities import is_number
from ugro.kernel.telemetry.model import Experiment, main_loss

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


# --- comparison -------------------------------------------------------------------------------------------------------
# The data of the compare page: runs and their groups for the curves, and differences by section.


MOST_SIDE_BY_SIDE = 20
_MOST_KEYS = 60
_MOST_VALUES = 8
_CODE = frozenset({"code", "git", "git branch"})
_OUTCOME = (
    "state", "took", "exit code", "attempts", "cached from", "result files", "last step",
    "loss is not finite", "throughput", "device use", "imbalance", "checkpoint of step",
)  # fmt: skip
_ENVIRONMENT = ("python", "machine", "CUDA of torch", "GPU driver", "package ", "nodes")


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]
    same: int  # how many facts are equal for all runs and therefore not among the rows


@dataclass(frozen=True, slots=True)
class Varied:
    """The values of a parameter over many runs."""

    name: str
    values: tuple[str, ...]  # the most frequent
    count: int  # of different values


def chosen(words: Sequence[str]) -> list[int]:
    """The job numbers of ``jobs=1,2&jobs=3``, each once."""
    found: dict[int, None] = {}
    for word in ",".join(words).replace(" ", "").split(","):
        if not word:
            continue
        if not is_number(word):
            raise UsageError(f"{word!r:.60} is not a job number", hint="example: /compare?jobs=12,13")
        found[int(word)] = None
    if len(found) > MOST_COMPARED:
        raise UsageError(f"{len(found):,} jobs are too many for one page", hint=f"at most {MOST_COMPARED:,}")
    return list(found)


def runs_document(runs: Sequence[Experiment]) -> dict[str, Any]:
    """For static/curves.js: the metrics, the name of each curve, and its groups."""
    names = [BY_CONFIGURATION, BY_NAME]
    groups = {name: groups_of(runs, name) for name in names}
    keys = sorted({key for one in runs for key in one.figures}, key=metric_order)[:_MOST_KEYS]
    return {
        "names": keys,
        "loss": main_loss(keys),
        "runs": [
            {"id": one.id, "name": f"{one.id} {one.name}", "groups": {name: groups[name][one.id] for name in names}}
            for one in runs
        ],
    }


def sections(rows: Sequence[Row], *, is_all: bool) -> list[Section]:
    titles = ("Configuration", "Code", "Environment", "Outcome")
    found: dict[str, list[Row]] = {title: [] for title in titles}
    for row in rows:
        found[_title(row.key)].append(row)
    return [
        Section(
            title,
            tuple(row for row in of_it if is_all or not row.is_same),
            0 if is_all else sum(row.is_same for row in of_it),
        )
        for title, of_it in found.items()
        if of_it
    ]


def varied(runs: Sequence[Experiment]) -> list[Varied]:
    """Parameters that differ between the runs, those with the fewest different values first."""
    counts: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys(name for one in runs for name in one.parameters):
        for one in runs:
            value = one.parameters.get(name, "not given")
            counts.setdefault(name, {})[value] = counts.get(name, {}).get(value, 0) + 1
    found = []
    for name, values in counts.items():
        if len(values) > 1:
            frequent = sorted(values, key=lambda value: -values[value])[:_MOST_VALUES]
            found.append(Varied(name, tuple(f"{value} ({values[value]}×)" for value in frequent), len(values)))
    return sorted(found, key=lambda one: one.count)


def _title(key: str) -> str:
    if key in _CODE:
        return "Code"
    if key.startswith((*_OUTCOME, METRIC)):
        return "Outcome"
    return "Environment" if key.startswith(_ENVIRONMENT) else "Configuration"
