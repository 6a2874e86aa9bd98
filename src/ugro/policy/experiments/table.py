"""Experiments as lines of a table: one for each, or one for all that belong together; in order, page by page. Pure.

A page begins after a line that is named by its value and its number, not by a count: what comes meanwhile moves none.
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

_LONGEST_LABEL = 160
BY_CONFIGURATION = "config"
BY_NAME = "name"
_OF_THE_NEWEST = frozenset({"id", "submitted"})  # of which a mean says nothing


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a group: the mean of those that have a number, and their standard deviation."""

    mean: float
    deviation: float | None  # None: of one there is none
    count: int


@dataclass(frozen=True, slots=True)
class Line:
    members: tuple[Experiment, ...]
    label: str = ""  # of a group

    @property
    def id(self) -> int:
        """Of its newest."""
        return self.members[0].id

    def cell(self, column: Column, now: float) -> Value | Spread:
        if len(self.members) == 1 or column.kind in _OF_THE_NEWEST:
            return column.value(self.members[0], now)
        values = [column.value(one, now) for one in self.members]
        if len(set(values)) == 1:
            return values[0]
        numbers = [float(value) for value in values if isinstance(value, float | int)]
        if numbers and column.kind != PARAMETER:  # the mean of what was chosen says nothing
            return spread(numbers)
        texts = dict.fromkeys(str(value) for value in values if value is not None)
        return next(iter(texts)) if len(texts) == 1 else f"{len(texts)} different" if texts else None


@dataclass(frozen=True, slots=True)
class Order:
    column: Column = field(default_factory=lambda: Column("id"))
    is_falling: bool = True

    @classmethod
    def parse(cls, text: str) -> Order:
        return cls(Column.parse(text.removeprefix("-")), text.startswith("-"))

    def __str__(self) -> str:
        return f"-{self.column}" if self.is_falling else str(self.column)


@dataclass(frozen=True, slots=True)
class Page:
    lines: tuple[Line, ...]
    total: int
    first: int  # the place of its first line among all, from 1
    before: str | None  # cursors of the pages beside it
    after: str | None


def spread(numbers: Sequence[float]) -> Spread:
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Spread(mean, None, 1)
    square = math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1)
    return Spread(mean, math.sqrt(square), len(numbers))


def lines(experiments: Iterable[Experiment], group: str) -> list[Line]:
    """``group``: nothing, ``config`` (all but the seed), ``name``, or a parameter's name. The newest first."""
    newest = sorted(experiments, key=lambda one: -one.id)
    if not group:
        return [Line((one,)) for one in newest]
    found: dict[object, list[Experiment]] = {}
    for one in newest:
        found.setdefault(_group_key(one, group), []).append(one)
    shown = _differing(newest) if group == BY_CONFIGURATION else frozenset()
    return [Line(tuple(members), label_of(members[0], group, shown)) for members in found.values()]


def groups_of(experiments: Sequence[Experiment], group: str) -> dict[int, str]:
    """By experiment, what its group is called."""
    return {one.id: line.label for line in lines(experiments, group) for one in line.members}


def label_of(one: Experiment, group: str, shown: frozenset[str]) -> str:
    if group == BY_NAME:
        return one.name
    if group == BY_CONFIGURATION:
        words = [f"{name} {value}" for name, value in configuration(one.parameters) if name in shown]
        return f"{one.name}: {', '.join(words)}"[:_LONGEST_LABEL] if words else one.name
    return f"{group} {one.parameters.get(group, 'not given')}"[:_LONGEST_LABEL]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page is: behind a cursor, before one, or at the beginning."""

    after: str = ""
    before: str = ""
    size: int = 100


def page(all_lines: Sequence[Line], order: Order, now: float, place: Place) -> Page:
    size = place.size
    rows = sorted(((_key(line, order, now), line) for line in all_lines), key=lambda row: row[0])
    begin = 0
    if place.after:
        begin = _place(rows, _cursor(place.after, order), is_after=True)
    elif place.before:
        begin = max(0, _place(rows, _cursor(place.before, order), is_after=False) - size)
    chosen = rows[begin : begin + size]
    return Page(
        tuple(line for _, line in chosen),
        len(rows),
        begin + 1 if chosen else 0,
        _written(chosen[0][1], order, now) if chosen and begin > 0 else None,
        _written(chosen[-1][1], order, now) if begin + size < len(rows) else None,
    )


_Key = tuple[int, float, str, int]


def _key(line: Line, order: Order, now: float) -> _Key:
    return _key_of(_plain(line, order, now), line.id, order)


def _plain(line: Line, order: Order, now: float) -> Value:
    value = line.cell(order.column, now)
    return value.mean if isinstance(value, Spread) else value


def _key_of(value: Value, number: int, order: Order) -> _Key:
    """Numbers, then words, then those without any: these are last whichever way one looks."""
    if isinstance(value, float | int) and math.isfinite(value):
        return (0, -value if order.is_falling else value, "", -number)
    if isinstance(value, str):
        return (1, 0.0, _reversed(value) if order.is_falling else value, -number)
    return (2, 0.0, "", -number)


def _reversed(text: str) -> str:
    """Such that a larger text comes before a smaller one; one that goes on comes before its beginning."""
    return "".join(chr(0x10FFFF - ord(letter)) for letter in text) + "\U0010ffff"


def _written(line: Line, order: Order, now: float) -> str:
    return json.dumps([_plain(line, order, now), line.id], separators=(",", ":"))


def _cursor(text: str, order: Order) -> _Key:
    try:
        value, number = json.loads(text)
        if isinstance(value, float | int | str | None) and type(number) is int:
            return _key_of(value, number, order)
    except (ValueError, TypeError):
        pass
    raise UsageError(f"there is no page {text!r:.60}", hint="begin at the first one")


def _place(rows: Sequence[tuple[_Key, Line]], cursor: _Key, *, is_after: bool) -> int:
    return sum(key <= cursor if is_after else key < cursor for key, _ in rows)


def _group_key(one: Experiment, group: str) -> object:
    if group == BY_NAME:
        return one.name
    if group == BY_CONFIGURATION:
        return (one.name, configuration(one.parameters))
    return Column(PARAMETER, group).value(one, 0.0)


def _differing(experiments: Sequence[Experiment]) -> frozenset[str]:
    """Parameters that tell experiments apart; a seed is none."""
    first: dict[str, str | None] = {}
    found: set[str] = set()
    names = {name for one in experiments for name in one.parameters if not is_seed(name)}
    for one in experiments:
        for name in names - found:
            value = one.parameters.get(name)
            if first.setdefault(name, value) != value:
                found.add(name)
    return frozenset(found)
