"""The experiments table: one line for each experiment or group, sorted, page by page. Pure.

A page's cursor names a line by its value and id, not by its position, so new experiments do not shift pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ugro.core.errors import UsageError
from ugro.core.experiment import Experiment
from ugro.policy.experiments.columns import PARAMETER, Column, Value
from ugro.policy.experiments.parameters import configuration, is_seed
from ugro.remote import foreign

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
