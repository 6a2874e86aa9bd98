"""Values written as YAML on one line, and quoted for a message; limits of what is read. It never reads YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

_LONGEST_SHOWN = 60


class Limits(NamedTuple):
    """How large a text may be, and how many values it may have, those that aliases repeat included."""

    bytes: int = 1 << 20
    values: int = 50_000


# Written without quotes only if every YAML parser reads it as a text.
_PLAIN = re.compile(r"[A-Za-z~/_.-][A-Za-z0-9~/_.+=-]*")
_NOT_TEXT = re.compile(r"~|null|true|false|yes|no|on|off|y|n|[-.]+|-?\.?[0-9].*|-?\.(?:inf|nan)", re.IGNORECASE)
_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")


def flow(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        is_plain = _IPV4.fullmatch(value) or (_PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value))
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(str(key))}: {flow(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(flow(part) for part in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**15:
        return f"{value:.0f}"
    return str(value)


def shown(value: object) -> str:
    """For "got …" in a message: safe for a terminal, and short."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f'"{printable(value)}"'
    # A float keeps its point: "expected a whole number, got 22" would be confusing for 22.0.
    return printable(str(value) if isinstance(value, float) else flow(value))


def printable(text: str) -> str:
    return escaped(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…")


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
