"""CRC-32C, masked as TensorBoard's files have it: rotated and shifted, so that a checksum of checksums differs.

Python's own libraries have no CRC-32C. Of many contents with the same length, all are computed at once: their first
bytes, then their second ones, as rows of bytes that ``bytes.translate`` looks up and large integers combine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

_MANY = 32  # from which on contents of the same length are computed together
_ONES, _SHIFT = 0xFFFFFFFF, 0xA282EAD8


def masked(content: bytes) -> int:
    bytewise, one, two, three, four = _tables()
    crc, words = _ONES, len(content) >> 3
    for word in struct.unpack_from(f"<{words}Q", content):
        word ^= crc
        crc = four[word & 0xFFFF] ^ three[word >> 16 & 0xFFFF] ^ two[word >> 32 & 0xFFFF] ^ one[word >> 48]
    for byte in content[words << 3 :]:
        crc = bytewise[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _ONES
    return ((crc >> 15 | crc << 17) + _SHIFT) & _ONES


def masked_all(contents: Sequence[bytes]) -> list[int]:
    """The same of each."""
    found = [0] * len(contents)
    places: dict[int, list[int]] = {}
    for place, content in enumerate(contents):
        places.setdefault(len(content), []).append(place)
    for length, chosen in places.items():
        some = [contents[place] for place in chosen]
        sums = _of_same_length(some, length) if len(some) >= _MANY and length else map(masked, some)
        for place, one in zip(chosen, sums, strict=True):
            found[place] = one
    return found


def _of_same_length(contents: Sequence[bytes], length: int) -> list[int]:
    joined, count, lookup = b"".join(contents), len(contents), _byte_tables()
    rows = [int.from_bytes(b"\xff" * count)] * 4  # the four bytes of each checksum so far, the lowest first
    for place in range(length):
        column = (rows[0] ^ int.from_bytes(joined[place::length])).to_bytes(count)
        changes = [int.from_bytes(column.translate(table)) for table in lookup]
        rows = [rows[1] ^ changes[0], rows[2] ^ changes[1], rows[3] ^ changes[2], changes[3]]
    columns = [row.to_bytes(count).translate(_INVERTED) for row in rows]
    crcs = struct.unpack(f"<{count}I", b"".join(map(bytes, zip(*columns, strict=True))))
    return [((crc >> 15 | crc << 17) + _SHIFT) & _ONES for crc in crcs]


_INVERTED = bytes(range(255, -1, -1))


@cache
def _byte_tables() -> list[bytes]:
    """The four bytes of each entry, the lowest first."""
    return [bytes(_entry(byte) >> shift & 0xFF for byte in range(256)) for shift in (0, 8, 16, 24)]


@cache
def _tables() -> tuple[tuple[int, ...], ...]:
    """For a byte; then for two bytes that are followed by 0, 2, 4 and 6 more of their word."""
    first = [_entry(byte) for byte in range(256)]
    tables = [first]
    for _ in range(7):
        tables.append([(crc >> 8) ^ first[crc & 0xFF] for crc in tables[-1]])
    pairs = zip(tables[::2], tables[1::2], strict=True)
    return tuple(first), *(tuple(low[x & 0xFF] ^ high[x >> 8] for x in range(1 << 16)) for high, low in pairs)


@cache
def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte
