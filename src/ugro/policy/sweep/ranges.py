"""Ranges on the command line: ``1e-5,2e-5`` some values, ``2..8`` whole numbers, ``log:1e-5..1e-2``. Pure.

They become parameters in the format of the file, so that there is one reader of both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ugro.core.errors import UsageError

_NUMBER = r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,9})?"
_SPAN = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_WHOLE = re.compile(r"[-+]?\d{1,400}")
_HINT = 'such as --lr "1e-5,2e-5", --layers 2..8, --dropout 0.0..0.5:0.1 or --lr log:1e-5..1e-2'


def split_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The words that stay as they are, and the parameters that some of them give."""
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(words):
        name, equals, text = words[at].partition("=")
        if not equals and at + 1 < len(words):
            text = words[at + 1]
        parameter = _parameter(name, text) if name.startswith("--") else None
        if parameter is None:
            rest.append(words[at])
            at += 1
            continue
        if name[2:] in found:
            raise UsageError(f"{name} is given twice", hint=_HINT)
        found[name[2:]] = parameter
        at += 1 if equals else 2
    return rest, found


def _parameter(name: str, text: str) -> dict[str, Any] | None:
    """None if the text is no range."""
    if span := _SPAN.fullmatch(text):
        return _span(name, bool(span[1]), span[2], span[3], span[4])
    if text.startswith("log:"):
        raise UsageError(f"{name}: {text!r} is not a range", hint=_HINT)
    if "," not in text or text.startswith(("{", "[")):
        return None
    values = [one.strip() for one in text.split(",")]
    if "" in values:
        raise UsageError(f"{name}: {text!r} has an empty value", hint=_HINT)
    return {"values": [value_of(one) for one in values]}


def _span(name: str, is_log: bool, low: str, high: str, step: str | None) -> dict[str, Any]:
    least, most = value_of(low), value_of(high)
    if least >= most:
        raise UsageError(f"{name}: {low} is not less than {high}", hint=_HINT)
    if is_log and least <= 0:
        raise UsageError(f"{name}: a logarithmic range begins above 0, not at {low}", hint=_HINT)
    if is_log and step:
        raise UsageError(f"{name}: a logarithmic range has no step", hint=_HINT)
    if is_log:
        return {"distribution": "log_uniform_values", "min": float(least), "max": float(most)}
    if step:
        return {"distribution": "q_uniform", "min": least, "max": most, "q": _positive(name, step)}
    is_whole = isinstance(least, int) and isinstance(most, int)
    return {"distribution": "int_uniform" if is_whole else "uniform", "min": least, "max": most}


def _positive(name: str, text: str) -> float:
    if (step := float(text)) <= 0:
        raise UsageError(f"{name}: a step is above 0, not {text}", hint=_HINT)
    return step


def value_of(text: str) -> Any:
    """A number if it looks like one; else the text, as the script would get it without a sweep."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if re.fullmatch(_NUMBER, text) else text
