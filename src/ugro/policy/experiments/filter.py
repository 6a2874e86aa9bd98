"""Filters experiments by words, ``tag:base``, ``state:failed``, ``lr>1e-4`` or ``best:val/loss<0.5``. Pure.

An experiment must match all terms; a term with a leading minus must not match.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping

from ugro.core.errors import UsageError
from ugro.core.experiment import Experiment
from ugro.policy.experiments.columns import FACTS, METRICS, PARAMETER, Column, Value
from ugro.policy.experiments.parameters import number

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
