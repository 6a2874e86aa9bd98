"""Reads what somebody else wrote: a job, another program or user of a node, a server. All of it is bounded.

An endless line must not fill the memory, and brackets in brackets must not end a program that walks through them.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import IO, Any, Iterator, List, Union

MOST_BYTES = 1 << 20
MOST_DEPTH = 100
_BLOCK = 1 << 20


class Malformed(ValueError):
    """Raised for what is no JSON, too long, or nested too deeply."""


def parsed(text: Union[str, bytes], most_bytes: int = MOST_BYTES) -> Any:
    """Returns the value of a JSON document. Raises Malformed."""
    if len(text) > most_bytes:
        raise Malformed("%d bytes of JSON, at most %d are read" % (len(text), most_bytes))
    try:
        value = json.loads(text)
    except RecursionError:
        raise Malformed("JSON that is nested without end") from None
    except ValueError as error:
        raise Malformed("no JSON: %s" % error) from error
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MOST_DEPTH and _is_deep(value):
        raise Malformed("JSON that is nested more than %d deep" % MOST_DEPTH)
    return value


def read(file: IO[bytes], most_bytes: int = MOST_BYTES) -> Any:
    """Returns the value of a file with a JSON document. Raises Malformed, also for one that is larger, and OSError."""
    return parsed(file.read(most_bytes + 1), most_bytes)


def lines(file: IO[bytes], longest: int = MOST_BYTES, most_bytes: int = 1 << 30) -> Iterator[bytes]:
    """Yields the lines of a file without their ends, but none that is longer, and nothing after so many bytes."""
    rest, is_too_long = b"", False
    while most_bytes > 0:
        block = file.read(min(_BLOCK, most_bytes))
        if not block:
            break
        most_bytes -= len(block)
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            if not is_too_long and len(line) <= longest:
                yield line
            is_too_long = False
        if len(rest) > longest:
            rest, is_too_long = b"", True
    if rest and not is_too_long:
        yield rest


def _is_deep(value: Any) -> bool:
    level: List[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _inside(value: Any) -> List[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
