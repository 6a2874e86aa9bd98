"""Patterns with ``*``, ``?`` and ``[a-z]``, matched without backtracking.

Anybody may write such a pattern, and anybody the name that it is held against. As a regular expression with several
``.*``, ``*a*a*a*b`` takes minutes for a name of 250 times ``a``, and no other thread runs meanwhile. Here the text
between two stars is found from left to right, each time at the first place where it fits, which is never wrong and
never taken back: the time is bounded by the length of the name times that of the pattern.
"""

import itertools
import re
from typing import Any, AnyStr, Callable, Generic, List, NamedTuple, Optional, Sequence, Tuple, Union

# Nothing longer is ever held against a pattern: Linux knows no longer path. What can only match more is not prepared.
_LONGEST = 4096
_MOST_TEXTS = 16  # a pattern such as *.py[cod] is taken as these


class _Piece(Generic[AnyStr]):
    """What is between two stars: a fixed number of characters, each of them given, any, or one of some."""

    __slots__ = ("count", "find", "starts", "texts")

    def __init__(self, signs: Sequence["_Sign"], example: AnyStr) -> None:
        self.count = len(signs)
        self.texts: Tuple[AnyStr, ...] = tuple(_as(text, example) for text in _texts(signs))
        if len(self.texts) == 1:
            plain = self.texts[0]
            self.starts: Callable[[AnyStr, int], bool] = lambda text, at: text.startswith(plain, at)
            self.find: Callable[[AnyStr, int, int], int] = lambda text, at, end: text.find(plain, at, end)
            return
        # No part of it repeats or has a choice of lengths: there is nothing to go back to.
        fixed = re.compile(_as("".join(sign.expression for sign in signs), example), re.DOTALL)
        self.starts = lambda text, at: fixed.match(text, at) is not None

        def find(text: AnyStr, at: int, end: int) -> int:
            found = fixed.search(text, at, end)
            return -1 if found is None else found.start()

        self.find = find


class Glob(Generic[AnyStr]):
    """A pattern of a whole name. A simple one matches just the names of ``whole``, or those with a beginning of
    ``beginnings``, or an end of ``endings``, and the other two are empty: who has many patterns looks there first.

    ``has_escapes``: as in ``.gitignore``, a backslash takes the next character as it is, and ``[^a]`` means ``[!a]``.
    Otherwise it is read as by ``fnmatch``.
    """

    __slots__ = ("_head", "_is_endless", "_least", "_middle", "_tail", "beginnings", "endings", "has_star", "whole")

    def __init__(self, pattern: AnyStr, has_escapes: bool = False) -> None:
        pieces = _pieces(pattern if isinstance(pattern, str) else pattern.decode("latin-1"), has_escapes)
        self.has_star = len(pieces) > 1
        self._least = sum(len(signs) for signs in pieces)
        self._is_endless = self._least > _LONGEST  # longer than any name: it matches none
        made = [_Piece(signs, pattern[:0]) for signs in ([[]] if self._is_endless else pieces)]
        self._head: _Piece[AnyStr] = made[0]
        self._tail: _Piece[AnyStr] = made[-1]
        self._middle: List[_Piece[AnyStr]] = made[1:-1]
        has_one = not self._is_endless and len(made) <= 2
        no: Tuple[AnyStr, ...] = ()
        self.whole: Tuple[AnyStr, ...] = self._head.texts if has_one and not self.has_star else no
        self.beginnings: Tuple[AnyStr, ...] = (
            self._head.texts if has_one and self.has_star and not self._tail.count else no
        )
        self.endings: Tuple[AnyStr, ...] = (
            self._tail.texts if has_one and self.has_star and self._tail.count and not self._head.count else no
        )

    @property
    def is_simple(self) -> bool:
        return bool(self.whole or self.beginnings or self.endings)

    def fits(self, text: AnyStr) -> bool:
        length = len(text)
        if self._is_endless or length < self._least or (length != self._least and not self.has_star):
            return False
        if not self._head.starts(text, 0):
            return False
        if not self.has_star:
            return True
        end = length - self._tail.count
        if not self._tail.starts(text, end):
            return False
        at = self._head.count
        for piece in self._middle:
            at = piece.find(text, at, end)
            if at < 0:
                return False
            at += piece.count
        return True


class PathGlob(Generic[AnyStr]):
    """A pattern of a path, part by part; the part ``**`` is any number of folders, at the end at least one name."""

    __slots__ = ("_has_any_folders", "_least", "_parts", "head", "whole")

    def __init__(self, pattern: AnyStr, has_escapes: bool = False) -> None:
        slash, any_folders = _as("/", pattern), _as("**", pattern)
        parts: List[Optional[Glob[AnyStr]]] = []
        words = pattern.split(slash)
        for index, word in enumerate(words):
            if word != any_folders:
                parts.append(Glob(word, has_escapes))
                continue
            if not parts or parts[-1] is not None:  # two of them mean the same as one
                parts.append(None)
            if index == len(words) - 1:
                parts.append(Glob(_as("*", pattern)))
        self._parts: List[Optional[Glob[AnyStr]]] = parts
        self._least = sum(part is not None for part in parts)
        self._has_any_folders = None in parts
        plain = [part.whole[0] for part in parts if part is not None and len(part.whole) == 1 and part.whole[0]]
        self.whole: Optional[AnyStr] = slash.join(plain) if len(plain) == len(parts) else None
        first = parts[0].whole if parts[0] is not None else plain[:0]
        self.head: Optional[AnyStr] = first[0] if len(first) == 1 else None  # the name of the first folder

    def fits(self, names: Sequence[AnyStr]) -> bool:
        """``names``: the parts of the path."""
        if len(names) < self._least or (len(names) > self._least and not self._has_any_folders):
            return False
        return _fit(self._parts, names)


def _fit(parts: Sequence[Optional[Glob[AnyStr]]], names: Sequence[AnyStr]) -> bool:
    """As for stars: only the last ``**`` is ever made to cover one more folder."""
    part = name = 0
    star = covered = -1
    while name < len(names):
        one = parts[part] if part < len(parts) else _AT_END
        if one is None:
            star, covered = part, name
            part += 1
        elif one is not _AT_END and one.fits(names[name]):
            part += 1
            name += 1
        elif star >= 0:
            covered += 1
            part, name = star + 1, covered
        else:
            return False
    return all(one is None for one in parts[part:])


_AT_END: Any = object()


def _as(text: str, example: AnyStr) -> AnyStr:
    made: Union[str, bytes] = text if isinstance(example, str) else text.encode("latin-1")
    return made  # type: ignore[return-value]


class _Sign(NamedTuple):
    """One character of a pattern that is no star."""

    expression: str
    is_one_of: str  # all that it can be; empty: too many


def _texts(signs: Sequence[_Sign]) -> List[str]:
    """All that these can be; none if that is too much."""
    count = 1
    for sign in signs:
        count *= len(sign.is_one_of)
        if not 1 <= count <= _MOST_TEXTS:
            return []
    return ["".join(chosen) for chosen in itertools.product(*(sign.is_one_of for sign in signs))]


def _pieces(pattern: str, has_escapes: bool) -> List[List[_Sign]]:
    """What is before, between and after the stars. Several stars mean the same as one."""
    found: List[List[_Sign]] = [[]]
    at = 0
    while at < len(pattern):
        one = pattern[at]
        at += 1
        if one == "*":
            found.append([])
            continue
        choice = _choice(pattern, at, has_escapes) if one == "[" else None
        if choice is not None:
            sign, at = choice
        elif one == "?":
            sign = _Sign(".", "")
        else:
            if one == "\\" and has_escapes and at < len(pattern):
                one = pattern[at]
                at += 1
            sign = _Sign(re.escape(one), one)
        found[-1].append(sign)
    return [found[0], *(one for one in found[1:-1] if one), found[-1]] if len(found) > 1 else found


def _choice(pattern: str, at: int, has_escapes: bool) -> Optional[Tuple[_Sign, int]]:
    """A class such as [a-z], and where it ends; None if it is not closed. A range of nothing, as z-a, adds nothing."""
    is_negated = pattern[at : at + 1] in (("!", "^") if has_escapes else ("!",))
    first = at + is_negated
    end = pattern.find("]", first + 1)
    if end < 0:
        return None
    ranges = set()
    while first < end:
        low = high = pattern[first]
        if first + 2 < end and pattern[first + 1] == "-":
            high = pattern[first + 2]
            first += 2
        first += 1
        if low <= high:
            ranges.add((low, high))
    if not ranges:
        return _Sign("." if is_negated else "(?!)", ""), end + 1
    inside = "".join(re.escape(low) + "-" + re.escape(high) for low, high in sorted(ranges))
    few = not is_negated and sum(ord(high) - ord(low) + 1 for low, high in ranges) <= _MOST_TEXTS
    signs = {chr(code) for low, high in ranges for code in range(ord(low), ord(high) + 1)} if few else set()
    return _Sign("[%s%s]" % ("^" if is_negated else "", inside), "".join(sorted(signs))), end + 1
