"""Columns of numbers as few bytes: differences in the narrowest type, bytes of equal weight together, then zlib.

Times and steps grow evenly, so their second differences are nearly nothing; a float's upper bytes change slowly.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any

_HEAD = struct.Struct("<BBIqq")  # how it was made, type, count, first value, first difference
_PLAIN, _SMALL = 0, 1
_TYPES = "bhiqdf"
_LIMITS = (("b", 1 << 7), ("h", 1 << 15), ("i", 1 << 31), ("q", 1 << 63))
_LEVEL = 1  # of zlib: higher levels gain a few per cent for several times the time
_LEAST_TO_PRESS = 64


class BadColumn(ValueError):
    """The bytes are not a valid column."""


def pack_whole(values: Sequence[int]) -> bytes:
    """Whole numbers of 64 bits."""
    first = values[0] if values else 0
    steps = list(map(sub, values[1:], values))
    slope = steps[0] if steps else 0
    return _packed(_narrowest(list(map(sub, steps[1:], steps))), len(values), first, slope)


def unpack_whole(content: bytes) -> list[int]:
    count, first, slope, curves = _unpacked(content)
    if count < 2:
        return [first][:count]
    return list(accumulate(accumulate(curves, initial=slope), initial=first))


def pack_real(values: Sequence[float]) -> bytes:
    """Lossless, including NaN and infinities; as 32 bits if that loses nothing."""
    wide = values if isinstance(values, array) and values.typecode == "d" else array("d", values)
    narrow = array("f", wide)
    is_exact = array("d", narrow).tobytes() == wide.tobytes()
    return _packed(narrow if is_exact else wide, len(wide), 0, 0)


def unpack_real(content: bytes) -> array[float]:
    column: array[float] = _unpacked(content)[3]
    return column if column.typecode == "d" else array("d", column)


def _narrowest(values: list[int]) -> array[int]:
    low, high = (min(values), max(values)) if values else (0, 0)
    code = next(code for code, limit in _LIMITS if -limit <= low and high < limit)
    return array(code, values)


def _packed(column: array[int] | array[float], count: int, first: int, slope: int) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    content = column.tobytes()
    how = _PLAIN
    if len(content) >= _LEAST_TO_PRESS:
        pressed = zlib.compress(shuffled(content, column.itemsize), _LEVEL)
        if len(pressed) < len(content):
            how, content = _SMALL, pressed
    return _HEAD.pack(how, _TYPES.index(column.typecode), count, first, slope) + content


def _unpacked(content: bytes) -> tuple[int, int, int, array[Any]]:
    try:
        how, kind, count, first, slope = _HEAD.unpack_from(content)
        column = array(_TYPES[kind])
        body = content[_HEAD.size :]
        column.frombytes(ordered(zlib.decompress(body), column.itemsize) if how == _SMALL else body)
    except (struct.error, zlib.error, IndexError, ValueError) as error:
        raise BadColumn(f"a column of metrics cannot be read: {error}") from error
    if sys.byteorder == "big":
        column.byteswap()
    return count, first, slope, column


def shuffled(content: bytes, width: int) -> bytes:
    return b"".join(content[place::width] for place in range(width)) if width > 1 else content


def ordered(content: bytes, width: int) -> bytes:
    if width == 1:
        return content
    ordered = bytearray(len(content))
    length = len(content) // width
    for place in range(width):
        ordered[place::width] = content[place * length : (place + 1) * length]
    return bytes(ordered)
