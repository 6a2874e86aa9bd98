"""A curve in few numbers: for each stretch of steps its least, largest and mean value, and how many there were.

A stretch's width is a power of two, and stretches begin at its multiples: those of any width can be put together into
those of a larger one, and two curves with the same width are binned alike.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add, itemgetter, sub
from typing import Any, TypeVar

# --- columns of numbers as few bytes ----------------------------------------------------------------------------------
# They are stored as differences in the narrowest type, bytes of equal weight together, then zlib. Times and steps grow
# evenly, so their second differences are nearly nothing; a float's upper bytes change slowly.


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


# --- bins -------------------------------------------------------------------------------------------------------------


_BINS_HEAD = struct.Struct("<qI")  # width, length
_COLUMNS = 7
_LEAST_TO_HALVE = 4
T = TypeVar("T", int, float)


def _reals() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Bins:
    """Columns of equal length, by number. Values that are not finite are counted in ``odd`` and in nothing else."""

    width: int
    numbers: list[int] = field(default_factory=list)  # a bin's first step is its number times the width
    lows: array[float] = field(default_factory=_reals)
    highs: array[float] = field(default_factory=_reals)
    sums: array[float] = field(default_factory=_reals)
    counts: list[int] = field(default_factory=list)
    odd: list[int] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)  # of the first point of each

    def __len__(self) -> int:
        return len(self.numbers)

    def pack(self) -> bytes:
        whole = (self.numbers, self.counts, self.odd, self.times_ms)
        columns = [array("q", part).tobytes() for part in whole]
        columns[1:1] = [part.tobytes() for part in (self.lows, self.highs, self.sums)]
        content = b"".join(shuffled(column, 8) for column in columns)
        return _BINS_HEAD.pack(self.width, len(self)) + zlib.compress(content, 1)


def unpack(content: bytes) -> Bins:
    """Decodes each column in one copy, because a chart reads thousands of these."""
    width, length = _BINS_HEAD.unpack_from(content)
    body = zlib.decompress(content[_BINS_HEAD.size :])
    size = 8 * length
    columns = [ordered(body[place * size : (place + 1) * size], 8) for place in range(_COLUMNS)]
    numbers, counts, odd, times = (array("q", columns[place]).tolist() for place in (0, 4, 5, 6))
    lows, highs, sums = (array("d", columns[place]) for place in (1, 2, 3))
    return Bins(width, numbers, lows, highs, sums, counts, odd, times)


def width_for(span: int, bins: int) -> int:
    """The smallest power of two for which ``span`` steps need at most that many bins (and one more, for alignment)."""
    wanted = -(-max(1, span) // max(1, bins))
    return 1 << (wanted - 1).bit_length()


def of_points(steps: Sequence[int], times_ms: Sequence[int], values: Sequence[float], width: int) -> Bins:
    """Bins of points that are ordered by step."""
    bins = Bins(width)
    begin = 0
    shift = width.bit_length() - 1
    while begin < len(steps):
        number = steps[begin] >> shift
        end = bisect_left(steps, (number + 1) << shift, begin)
        _add_points(bins, number, values[begin:end], times_ms[begin])
        begin = end
    return bins


def together(parts: Iterable[Bins], width: int) -> Bins:
    """Merges them, with bins as wide as ``width`` or the widest of them."""
    found = [part for part in parts if len(part)]
    width = max([width, *(part.width for part in found)])
    wide = [_widened(part, width) for part in found]
    if not wide:
        return Bins(width)
    if len(wide) == 1:
        return wide[0]
    if all(left.numbers[-1] < right.numbers[0] for left, right in pairwise(wide)):
        return _joined(wide, width)
    rows = sorted((row for part in wide for row in _rows(part)), key=itemgetter(0))
    return _regrouped(_of_rows(rows, width), 0)


def _widened(bins: Bins, width: int) -> Bins:
    while bins.width < width and _is_dense(bins):
        bins = _halved(bins)
    return bins if bins.width == width else _regrouped(bins, (width // bins.width).bit_length() - 1)


def _is_dense(bins: Bins) -> bool:
    return len(bins) >= _LEAST_TO_HALVE and bins.numbers[-1] - bins.numbers[0] + 1 == len(bins)


def _halved(bins: Bins) -> Bins:
    """Merges pairs of adjacent bins, a whole column at a time."""
    begin, end = bins.numbers[0] & 1, len(bins) - (~bins.numbers[-1] & 1)
    first, last = range(begin), range(end, len(bins))  # one without a partner, at either end
    numbers = list(range(bins.numbers[0] >> 1, (bins.numbers[-1] >> 1) + 1))

    def put(column: Sequence[T], merge: Callable[[T, T], T] | None) -> list[T]:
        merged = [column[at] for at in first]
        left, right = column[begin:end:2], column[begin + 1 : end : 2]
        merged += map(merge, left, right) if merge else left
        return merged + [column[at] for at in last]

    return Bins(
        bins.width * 2,
        numbers,
        array("d", put(bins.lows, min)),
        array("d", put(bins.highs, max)),
        array("d", put(bins.sums, add)),
        put(bins.counts, add),
        put(bins.odd, add) if any(bins.odd) else [0] * len(numbers),
        put(bins.times_ms, None),
    )


def _regrouped(bins: Bins, shift: int) -> Bins:
    """Merges neighbours whose number is the same after the shift."""
    new = Bins(bins.width << shift)
    begin = 0
    numbers = bins.numbers
    while begin < len(numbers):
        number = numbers[begin] >> shift
        end = bisect_left(numbers, (number + 1) << shift, begin)
        new.numbers.append(number)
        new.lows.append(min(bins.lows[begin:end]))
        new.highs.append(max(bins.highs[begin:end]))
        new.sums.append(sum(bins.sums[begin:end]))
        new.counts.append(sum(bins.counts[begin:end]))
        new.odd.append(sum(bins.odd[begin:end]))
        new.times_ms.append(min(bins.times_ms[begin:end]))
        begin = end
    return new


def _joined(parts: Sequence[Bins], width: int) -> Bins:
    whole = Bins(width)
    for part in parts:
        whole.numbers += part.numbers
        whole.lows += part.lows
        whole.highs += part.highs
        whole.sums += part.sums
        whole.counts += part.counts
        whole.odd += part.odd
        whole.times_ms += part.times_ms
    return whole


def _rows(bins: Bins) -> Iterable[tuple[int, float, float, float, int, int, int]]:
    return zip(
        bins.numbers, bins.lows, bins.highs, bins.sums, bins.counts, bins.odd, bins.times_ms, strict=True
    )


def _of_rows(rows: Sequence[tuple[int, float, float, float, int, int, int]], width: int) -> Bins:
    numbers, lows, highs, sums, counts, odd, times = (list(column) for column in zip(*rows, strict=True))
    return Bins(width, numbers, array("d", lows), array("d", highs), array("d", sums), counts, odd, times)


def _add_points(bins: Bins, number: int, values: Sequence[float], time_ms: int) -> None:
    total = sum(values)
    odd = 0
    if not math.isfinite(total):  # rare: only then is each value examined
        finite = [value for value in values if math.isfinite(value)]
        odd = len(values) - len(finite)
        values, total = finite, math.fsum(value / len(finite) for value in finite) * len(finite) if finite else 0.0
    bins.numbers.append(number)
    bins.lows.append(min(values) if values else math.inf)
    bins.highs.append(max(values) if values else -math.inf)
    bins.sums.append(total)
    bins.counts.append(len(values))
    bins.odd.append(odd)
    bins.times_ms.append(time_ms)
