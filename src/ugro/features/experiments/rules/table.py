"""The experiments table: one line for each experiment or group, sorted, page by page. Pure.

A page's cursor names a line by its value and id, not by its position, so new experiments do not shift pages.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ugro.kernel.support.errors import UsageError
from ugro.kernel.telemetry.model import Experiment, Figure, is_held_out, is_loss
from ugro.kernel.telemetry.rules import configuration, is_seed, number
from ugro.node import foreign

# --- columns ----------------------------------------------------------------------------------------------------------
# The columns of the experiments table: a fact, a parameter, or the value of a metric. Pure.
#
# A column is written ``name``, ``param:lr`` or ``best:val/loss``, in addresses too.


Value = float | str | None
PARAMETER = "param"
METRICS = ("last", "best", "min", "max")
_DEFAULT_PARAMETERS = 4
_MAX_LISTED = 200
_LARGER = re.compile(
    r"acc|auc|f1|bleu|rouge|score|reward|return|precision|recall|iou|map$|throughput|per_s(ec(ond)?)?$|use$|util",
    re.IGNORECASE,
)

_FACTS: dict[str, Callable[[Experiment, float], Value]] = {
    "id": lambda one, now: one.id,
    "name": lambda one, now: one.name,
    "state": lambda one, now: one.state.value,
    "user": lambda one, now: one.user,
    "submitted": lambda one, now: one.submitted_s,
    "duration": lambda one, now: None if one.started_s is None else (one.ended_s or now) - one.started_s,
    "steps": lambda one, now: max((figure.last_step for figure in one.figures.values()), default=None),
    "energy": lambda one, now: one.energy_wh,
    "cost": lambda one, now: one.cost,
    "tags": lambda one, now: " ".join(one.tags) or None,
    "note": lambda one, now: one.note or None,
}
FACTS = tuple(_FACTS)


@dataclass(frozen=True, slots=True)
class Column:
    kind: str  # a fact, ``param``, or one of METRICS
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Column:
        kind, _, key = text.partition(":")
        if kind in _FACTS and not key:
            return cls(kind)
        if kind in (PARAMETER, *METRICS) and key:
            return cls(kind, key)
        known = f"{', '.join(FACTS)}, param:NAME, best:METRIC, last:METRIC"
        raise UsageError(f"unknown column {text!r:.80}", hint=f"columns: {known}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}" if self.key else self.kind

    @property
    def label(self) -> str:
        if self.kind == PARAMETER:
            return self.key
        return f"{self.key} {self.kind}" if self.key else self.kind

    def value(self, one: Experiment, now: float) -> Value:
        if self.kind in _FACTS:
            return _FACTS[self.kind](one, now)
        if self.kind == PARAMETER:
            text = one.parameters.get(self.key)
            found = None if text is None else number(text)
            return text if found is None else found
        figure = one.figures.get(self.key)
        return None if figure is None else _measured(self, figure)


def is_larger_better(key: str) -> bool:
    return _LARGER.search(key) is not None and not is_loss(key)


def best_of(key: str, figure: Figure) -> float | None:
    """What ``best`` means everywhere: the smallest value, or the largest of a metric that should be large."""
    return figure.most if is_larger_better(key) else figure.least


def known_columns(experiments: Iterable[Experiment]) -> list[Column]:
    """All columns: facts, then parameters and metrics, the most frequent first."""
    parameters: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    for one in experiments:
        parameters.update(one.parameters.keys())
        metrics.update(one.figures.keys())
    names = [name for name, _ in parameters.most_common(_MAX_LISTED)]
    keys = [key for key, _ in metrics.most_common(_MAX_LISTED)]
    measured = [Column(kind, key) for key in sorted(keys, key=metric_order) for kind in METRICS]
    return [*map(Column, FACTS), *(Column(PARAMETER, name) for name in names), *measured]


def columns_at_first(experiments: Sequence[Experiment]) -> list[Column]:
    """The default columns: state and times, the parameters that differ, and the most important metric."""
    values: dict[str, set[str]] = {}
    metrics: Counter[str] = Counter()
    for one in experiments:
        metrics.update(one.figures.keys())
        for name, text in one.parameters.items():
            values.setdefault(name, set()).add(text)
    differing = [name for name, found in values.items() if len(found) > 1]
    # A seed is the least interesting parameter; it comes last.
    differing.sort(key=lambda name: (is_seed(name), name.startswith("env."), len(values[name])))
    keys = sorted(metrics, key=lambda key: (-metrics[key] // max(1, len(experiments) // 4), *metric_order(key)))[:1]
    measured = [Column(kind, key) for key in keys for kind in ("best", "last")]
    chosen = [Column(PARAMETER, name) for name in differing[:_DEFAULT_PARAMETERS]]
    energy = [Column("energy")] if any(one.energy_wh is not None for one in experiments) else []
    cost = [Column("cost")] if any(one.cost is not None for one in experiments) else []
    facts = [Column("duration"), *energy, *cost, Column("submitted"), Column("tags")]
    return [Column("state"), *chosen, *measured, *facts]


def metric_order(key: str) -> tuple[bool, bool, str]:
    return (not is_loss(key), not is_held_out(key), key)


def _measured(column: Column, figure: Figure) -> float | None:
    if column.kind == "best":
        return best_of(column.key, figure)
    return {"last": figure.last, "min": figure.least, "max": figure.most}[column.kind]


# --- filter -----------------------------------------------------------------------------------------------------------
# Filters experiments by words, ``tag:base``, ``state:failed``, ``lr>1e-4`` or ``best:val/loss<0.5``. Pure.
#
# An experiment must match all terms; a term with a leading minus must not match.


Test = Callable[[Experiment], bool]
_HINT = "such as: resnet tag:base state:succeeded lr>1e-4 best:loss<0.5 -user:ann"
_COMPARISON = re.compile(r"([^<>=!]+)(<=|>=|!=|<|>|=)(.*)", re.DOTALL)
_ORDER: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


def matching(experiments: Iterable[Experiment], text: str, now: float) -> list[Experiment]:
    tests = [_test(term, now) for term in _terms(text)]
    return [one for one in experiments if all(test(one) for test in tests)]


def _terms(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"invalid filter: {str(error).lower()}", hint=_HINT) from None


def _test(term: str, now: float) -> Test:
    if term.startswith("-") and len(term) > 1:
        positive = _test(term[1:], now)
        return lambda one: not positive(one)
    if compared := _COMPARISON.fullmatch(term):
        return _comparison(compared[1], compared[2], compared[3], now)
    field, colon, value = term.partition(":")
    if colon and value and field in _FIELDS:
        return _FIELDS[field](value.casefold())
    return _word(term.casefold())


def _word(word: str) -> Test:
    def test(one: Experiment) -> bool:
        texts = (one.name, one.user, one.note, str(one.id), *one.tags)
        return any(word in text.casefold() for text in texts) or any(
            word in f"{name}={value}".casefold() for name, value in one.parameters.items()
        )

    return test


_FIELDS: Mapping[str, Callable[[str], Test]] = {
    "tag": lambda word: lambda one: any(word == tag.casefold() for tag in one.tags),
    "state": lambda word: lambda one: one.state.value == word,
    "user": lambda word: lambda one: one.user.casefold() == word,
    "name": lambda word: lambda one: word in one.name.casefold(),
    "note": lambda word: lambda one: word in one.note.casefold(),
}


def _comparison(name: str, sign: str, wanted: str, now: float) -> Test:
    limit = number(wanted)
    if limit is None and sign not in ("=", "!="):
        raise UsageError(f"{name}{sign}{wanted}: {wanted!r} is not a number", hint=_HINT)

    def test(one: Experiment) -> bool:
        value = _value(name, one, now)
        if value is None:
            return sign == "!="
        if limit is not None and isinstance(value, float | int):
            return _ORDER[sign](value, limit)
        return sign in ("=", "!=") and (str(value) == wanted) == (sign == "=")

    return test


def _value(name: str, one: Experiment, now: float) -> Value:
    """The value of the column; otherwise of the parameter, the metric (its best) or the fact with that name."""
    kind = name.partition(":")[0]
    if ":" in name and kind in (PARAMETER, *METRICS):
        return Column.parse(name).value(one, now)
    if name in one.parameters:
        return Column(PARAMETER, name).value(one, now)
    if name in one.figures:
        return Column("best", name).value(one, now)
    return Column(name).value(one, now) if name in FACTS else None


# --- table ------------------------------------------------------------------------------------------------------------


_MAX_LABEL = 160
_LARGEST = 1e150  # the square of a larger number is none
BY_CONFIGURATION = "config"
BY_NAME = "name"
_OF_THE_NEWEST = frozenset({"id", "submitted"})  # a mean of these is meaningless


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean and standard deviation of a group's members that have a number."""

    mean: float
    deviation: float | None  # None for a single number
    count: int


@dataclass(frozen=True, slots=True)
class Line:
    members: tuple[Experiment, ...]
    label: str = ""  # of a group; empty for a single experiment

    @property
    def id(self) -> int:
        """The id of its newest member."""
        return self.members[0].id

    def cell(self, column: Column, now: float) -> Value | Spread:
        if len(self.members) == 1 or column.kind in _OF_THE_NEWEST:
            return column.value(self.members[0], now)
        values = [column.value(one, now) for one in self.members]
        if len(set(values)) == 1:
            return values[0]
        numbers = [float(value) for value in values if isinstance(value, float | int)]
        if numbers and column.kind != PARAMETER:  # a mean of parameters is meaningless
            return spread(numbers)
        texts = dict.fromkeys(str(value) for value in values if value is not None)
        return next(iter(texts)) if len(texts) == 1 else f"{len(texts)} different" if texts else None


@dataclass(frozen=True, slots=True)
class SortOrder:
    column: Column = field(default_factory=lambda: Column("id"))
    is_falling: bool = True

    @classmethod
    def parse(cls, text: str) -> SortOrder:
        return cls(Column.parse(text.removeprefix("-")), text.startswith("-"))

    def __str__(self) -> str:
        return f"-{self.column}" if self.is_falling else str(self.column)


@dataclass(frozen=True, slots=True)
class Page:
    lines: tuple[Line, ...]
    total: int
    first: int  # the number of its first line among all, from 1
    before: str | None  # the cursors of the previous and next page
    after: str | None


def spread(numbers: Sequence[float]) -> Spread:
    # A job may write any number: of a very large one, the square or the sum is more than a float holds.
    largest = max(map(abs, numbers))
    scale = largest if largest > _LARGEST else 1.0
    mean = scale * (math.fsum(value / scale for value in numbers) / len(numbers))
    if len(numbers) == 1:
        return Spread(mean, None, 1)
    square = math.fsum((value / scale - mean / scale) ** 2 for value in numbers) / (len(numbers) - 1)
    return Spread(mean, scale * math.sqrt(square), len(numbers))


def lines(experiments: Iterable[Experiment], group: str) -> list[Line]:
    """Newest first. ``group``: empty, ``config`` (all parameters but the seed), ``name``, or a parameter's name."""
    newest = sorted(experiments, key=lambda one: -one.id)
    if not group:
        return [Line((one,)) for one in newest]
    found: dict[object, list[Experiment]] = {}
    for one in newest:
        found.setdefault(_group_key(one, group), []).append(one)
    shown = _differing(newest) if group == BY_CONFIGURATION else frozenset()
    return [Line(tuple(members), label_of(members[0], group, shown)) for members in found.values()]


def groups_of(experiments: Sequence[Experiment], group: str) -> dict[int, str]:
    """The label of each experiment's group, by experiment."""
    return {one.id: line.label for line in lines(experiments, group) for one in line.members}


def label_of(one: Experiment, group: str, shown: frozenset[str]) -> str:
    if group == BY_NAME:
        return one.name
    if group == BY_CONFIGURATION:
        words = [f"{name} {value}" for name, value in configuration(one.parameters) if name in shown]
        return f"{one.name}: {', '.join(words)}"[:_MAX_LABEL] if words else one.name
    return f"{group} {one.parameters.get(group, 'not given')}"[:_MAX_LABEL]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a page is: after a cursor, before one, or at the beginning."""

    after: str = ""
    before: str = ""
    size: int = 100


def page(all_lines: Sequence[Line], order: SortOrder, now: float, position: Position) -> Page:
    size = position.size
    rows = sorted(((_key(line, order, now), line) for line in all_lines), key=lambda row: row[0])
    begin = 0
    if position.after:
        begin = _index(rows, _cursor(position.after, order), is_after=True)
    elif position.before:
        begin = max(0, _index(rows, _cursor(position.before, order), is_after=False) - size)
    chosen = rows[begin : begin + size]
    return Page(
        tuple(line for _, line in chosen),
        len(rows),
        begin + 1 if chosen else 0,
        _written(chosen[0][1], order, now) if chosen and begin > 0 else None,
        _written(chosen[-1][1], order, now) if begin + size < len(rows) else None,
    )


_Key = tuple[int, float, str, int]


def _key(line: Line, order: SortOrder, now: float) -> _Key:
    return _key_of(_plain(line, order, now), line.id, order)


def _plain(line: Line, order: SortOrder, now: float) -> Value:
    value = line.cell(order.column, now)
    return value.mean if isinstance(value, Spread) else value


def _key_of(value: Value, number: int, order: SortOrder) -> _Key:
    """Numbers, then texts, then missing values, which are last in either direction."""
    if isinstance(value, float | int) and math.isfinite(value):
        return (0, -value if order.is_falling else value, "", -number)
    if isinstance(value, str):
        return (1, 0.0, _reversed(value) if order.is_falling else value, -number)
    return (2, 0.0, "", -number)


def _reversed(text: str) -> str:
    """A key that sorts texts in reverse; a longer text comes before its own prefix."""
    return "".join(chr(0x10FFFF - ord(letter)) for letter in text) + "\U0010ffff"


def _written(line: Line, order: SortOrder, now: float) -> str:
    return json.dumps([_plain(line, order, now), line.id], separators=(",", ":"))


def _cursor(text: str, order: SortOrder) -> _Key:
    try:
        value, number = foreign.parsed(text)
        if isinstance(value, float | int | str | None) and type(number) is int:
            return _key_of(value, number, order)
    except (ValueError, TypeError):
        pass
    raise UsageError(f"there is no page {text!r:.60}", hint="begin at the first one")


def _index(rows: Sequence[tuple[_Key, Line]], cursor: _Key, *, is_after: bool) -> int:
    return sum(key <= cursor if is_after else key < cursor for key, _ in rows)


def _group_key(one: Experiment, group: str) -> object:
    if group == BY_NAME:
        return one.name
    if group == BY_CONFIGURATION:
        return (one.name, configuration(one.parameters))
    return Column(PARAMETER, group).value(one, 0.0)


def _differing(experiments: Sequence[Experiment]) -> frozenset[str]:
    """The parameters in which experiments differ, without seeds."""
    first: dict[str, str | None] = {}
    found: set[str] = set()
    names = {name for one in experiments for name in one.parameters if not is_seed(name)}
    for one in experiments:
        for name in names - found:
            value = one.parameters.get(name)
            if first.setdefault(name, value) != value:
                found.add(name)
    return frozenset(found)
