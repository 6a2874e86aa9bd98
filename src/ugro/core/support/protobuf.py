"""Reads the fields of protobuf messages, without their descriptions and without protobuf."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}

Field = int | bytes


class Damaged(ValueError):
    """Not what it should be from here on; nothing after it can be read."""


def fields(message: bytes) -> Iterator[tuple[int, Field]]:
    """The number and the value of each; a fixed-size number comes as its bytes."""
    place = 0
    while place < len(message):
        key, place = varint(message, place)
        kind = key & 7
        if kind == VARINT:
            value, place = varint(message, place)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, place = varint(message, place)
        elif kind in FIXED_SIZES:
            size = FIXED_SIZES[kind]
        else:
            raise Damaged(f"a field of kind {kind}")
        if place + size > len(message):
            raise Damaged("a field is longer than its message")
        yield key >> 3, message[place : place + size]
        place += size


def messages(message: bytes, number: int) -> Iterator[bytes]:
    """The messages, texts or bytes in the fields of that number."""
    return (value for field, value in fields(message) if field == number and isinstance(value, bytes))


def varint(message: bytes, place: int) -> tuple[int, int]:
    """The number, and where it ends."""
    result = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        result |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return result & (2**64 - 1), place
    raise Damaged("an unterminated number")


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
