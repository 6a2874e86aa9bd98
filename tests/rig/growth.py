"""Finds regular expressions whose time grows faster than the text: quadratically, or without end.

An expression becomes the graph of its characters: which may follow which. It is slow if one stretch of text can be
read in two ways and go on in both (``(ab|a|b)*``), or by two loops after each other whose border is free to move
(``a*a*b``), and it can still fail afterwards. A search may begin anywhere, which is one more such loop before it. A
repetition with a limit counts as a constant. Looking around is left out, so some that are named are not slow: those
need a reason.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

_SIGNS = [chr(code) for code in range(128)] + ["é", "ſ", "٣", "─", "…", "中", "\xa0"]
_BYTES = [bytes([code]) for code in range(256)]
_KNOWN: dict[str, frozenset[Any]] = {}
_LOOPS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


@dataclass
class _Part:
    """Of an expression: the places it can begin and end with, and whether it can be empty."""

    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    is_nullable: bool = True


class Graph:
    def __init__(self, pattern: re.Pattern[Any], how: str) -> None:
        tree = _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
        self._flags = pattern.flags
        self._signs: list[Any] = _BYTES if isinstance(pattern.pattern, bytes) else _SIGNS
        self._state = tree.state
        self.chars: list[frozenset[Any]] = []
        self.follow: dict[int, Counter[int]] = {}
        self.inner: list[Any] = []  # expressions of what is looked at
        self._reached: dict[int, set[int]] = {}
        items = list(tree)
        whole = self._sequence(items)
        if how not in ("match", "fullmatch"):
            whole = self._anywhere(items, whole)
        is_to_end = how == "fullmatch" or _ends_with_anchor(items)
        takes_all = {at for at in whole.last if len(self.chars[at]) == len(self._signs) and self.follow[at][at]}
        # From here it cannot fail any more: whatever follows is taken, or left.
        self.safe = {at for at in whole.last if not is_to_end or at in takes_all or takes_all & set(self.follow[at])}

    def _anywhere(self, items: list[Any], whole: _Part) -> _Part:
        anchor = items[0] if items else None
        if anchor is not None and anchor[0] is _constants.AT:
            if anchor[1] is _constants.AT_BEGINNING_STRING or not self._flags & re.MULTILINE:
                return whole if anchor[1] is not _constants.AT_BOUNDARY else self._then(self._loop_of_all(), whole)
            line = self._atom(frozenset({b"\n" if self._signs is _BYTES else "\n"}))
            return self._then(self._then(self._loop_of_all(), line), whole)
        return self._then(self._loop_of_all(), whole)

    def _loop_of_all(self) -> _Part:
        return self._loop(self._atom(frozenset(self._signs)), least=0)

    def _atom(self, signs: frozenset[Any]) -> _Part:
        place = len(self.chars)
        self.chars.append(signs)
        self.follow[place] = Counter()
        return _Part(Counter([place]), Counter([place]), is_nullable=False)

    def _then(self, one: _Part, two: _Part) -> _Part:
        self._join(one.last, two.first)
        first = one.first + two.first if one.is_nullable else one.first
        last = one.last + two.last if two.is_nullable else two.last
        return _Part(first, last, is_nullable=one.is_nullable and two.is_nullable)

    def _loop(self, one: _Part, least: int) -> _Part:
        self._join(one.last, one.first)
        return _Part(one.first, one.last, is_nullable=one.is_nullable or least == 0)

    def _join(self, lasts: Counter[int], firsts: Counter[int]) -> None:
        for place in lasts:
            for then, ways in firsts.items():
                self.follow[place][then] += ways

    def _sequence(self, items: Iterable[Any]) -> _Part:
        found = _Part()
        for kind, value in items:
            found = self._then(found, self._item(kind, value))
        return found

    def _item(self, kind: Any, value: Any) -> _Part:
        if kind in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN):
            return self._atom(self._chars_of(kind, value))
        if kind is _constants.SUBPATTERN:
            return self._sequence(value[-1])
        if kind is _constants.BRANCH:
            parts = [self._sequence(one) for one in value[1]]
            first = sum((one.first for one in parts), Counter[int]())
            last = sum((one.last for one in parts), Counter[int]())
            return _Part(first, last, is_nullable=any(one.is_nullable for one in parts))
        if kind in _LOOPS:
            return self._repeat(*value)
        if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            self.inner.append(value[1])
        elif kind is not _constants.AT:
            raise NotImplementedError(f"{kind} is not known here: avoid it, or teach it to this file")
        return _Part()

    def _repeat(self, least: int, most: Any, body: Any) -> _Part:
        if most is _constants.MAXREPEAT:
            once = [self._sequence(body) for _ in range(min(least, 2) - 1)]
            found = _Part()
            for one in once:
                found = self._then(found, one)
            return self._then(found, self._loop(self._sequence(body), least=least))
        low, high = _parser.SubPattern(self._state, list(body)).getwidth()
        if most > 8 and low != high:  # repetitions in repetitions multiply
            return self._loop(self._sequence(body), least=least)
        copies = [self._sequence(body) for _ in range(min(most, 8 if low != high else 3))]
        for one, two in itertools.pairwise(copies):
            self._join(one.last, two.first)
        ends = copies[max(0, min(least, len(copies)) - 1) :]
        last = sum((one.last for one in ends), Counter[int]())
        return _Part(copies[0].first, last, is_nullable=least == 0 or copies[0].is_nullable) if copies else _Part()

    def _chars_of(self, kind: Any, value: Any) -> frozenset[Any]:
        key = f"{kind} {value} {self._flags} {self._signs is _BYTES}"
        if key not in _KNOWN:
            single = _parser.SubPattern(self._state, [(kind, value)])
            one = _compiler.compile(single, self._flags & ~re.DEBUG)
            _KNOWN[key] = frozenset(sign for sign in self._signs if one.fullmatch(sign))
        return _KNOWN[key]

    # --- the search ---------------------------------------------------------------------------------------------

    def is_slow(self) -> bool:
        loops = [at for at in self.follow if self._leads(at, at)]
        risky = [at for at in loops if at not in self.safe]
        several_ways = any(ways > 1 and self._leads(then, at) for at in risky for then, ways in self.follow[at].items())
        slides = any(self._slides(one, two) for two in risky for one in loops if one != two and self._leads(one, two))
        return several_ways or slides or any(self._doubles(at) for at in risky)

    def _slides(self, one: int, two: int) -> bool:
        """Some text leads from one to one, from one to two and from two to two."""
        return self._meet((one, one, two), (one, two, two))

    def _doubles(self, at: int) -> bool:
        """Some text leads from here to here in two ways."""
        start = (at, at, 0)
        seen, todo = {start}, deque([start])
        while todo:
            left, right, has_parted = todo.popleft()
            for then, other in self._steps(left, right):
                state = (then, other, int(bool(has_parted) or then != other))
                if state == (at, at, 1):
                    return True
                if state not in seen and self._leads(then, at) and self._leads(other, at):
                    seen.add(state)
                    todo.append(state)
        return False

    def _meet(self, start: tuple[int, int, int], end: tuple[int, int, int]) -> bool:
        seen, todo = {start}, deque([start])
        while todo:
            for then in self._steps(*todo.popleft()):
                if then == end:
                    return True
                if then not in seen and all(map(self._leads, then, end)):
                    seen.add(then)
                    todo.append(then)
        return False

    def _steps(self, *places: int) -> Iterator[Any]:
        def choose(left: tuple[int, ...], signs: frozenset[Any] | None, made: tuple[int, ...]) -> Iterator[Any]:
            if not left:
                yield made
                return
            for then in self.follow[left[0]]:
                both = self.chars[then] if signs is None else signs & self.chars[then]
                if both:
                    yield from choose(left[1:], both, (*made, then))

        yield from choose(places, None, ())

    def _leads(self, one: int, two: int) -> bool:
        if one not in self._reached:
            seen: set[int] = set()
            todo = list(self.follow[one])
            while todo:
                then = todo.pop()
                if then not in seen:
                    seen.add(then)
                    todo += self.follow[then]
            self._reached[one] = seen
        return two in self._reached[one]


def _ends_with_anchor(items: list[Any]) -> bool:
    if not items:
        return False
    kind, value = items[-1]
    if kind is _constants.AT:
        return value in (_constants.AT_END, _constants.AT_END_STRING)
    if kind is _constants.SUBPATTERN:
        return _ends_with_anchor(list(value[-1]))
    return kind is _constants.BRANCH and any(_ends_with_anchor(list(one)) for one in value[1])


def is_slow(pattern: re.Pattern[Any], how: str) -> bool:
    """Whether the time to ``match``, ``fullmatch`` or ``search`` can grow faster than the text."""
    return Graph(pattern, how).is_slow()
