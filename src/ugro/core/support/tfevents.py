"""Reads the scalars of TensorBoard event files, without TensorFlow, TensorBoard or protobuf.

A file is a sequence of records, each with its length and two checksums. A record is an Event message; those with a
Summary contain named values. The file may still be written to: an incomplete record is left for the next read.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_MAX_RECORD = 64 << 20  # these files also contain images and graphs

# Field numbers of the messages (event.proto, summary.proto, tensor.proto, types.proto).
_EVENT_TIME, _EVENT_STEP, _EVENT_SUMMARY = 1, 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_CONTENT = 1, 2, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Scalar:
    tag: str
    step: int
    time_unix: float
    value: float


class Damaged(ValueError):
    """Not an event file from here on; nothing after it can be read."""


def parse(content: bytes) -> tuple[list[Scalar], int]:
    """The scalars of all complete records, and the size of those records in bytes.

    Raises ``Damaged`` if ``content`` does not begin with a record.
    """
    found: list[Scalar] = []
    place = 0
    while (end := _end(content, place)) <= len(content):
        record = content[place + _HEADER_BYTES : end - _CHECKSUM.size]
        if masked_checksum(record) != _CHECKSUM.unpack_from(content, end - _CHECKSUM.size)[0]:
            if place:
                break  # the next read begins here and raises
            raise Damaged("a record does not match its checksum")
        with contextlib.suppress(Damaged):  # complete, but of an unknown kind
            found += _of_event(record)
        place = end
    return found, place


def _end(content: bytes, place: int) -> int:
    try:
        return record_end(content, place)
    except Damaged:
        if place:
            return len(content) + 1  # the next read begins here and raises
        raise


def record_end(content: bytes, place: int = 0) -> int:
    """The end of the record that begins there; beyond ``content`` if the record is incomplete."""
    if place + _HEADER_BYTES > len(content):
        return place + _HEADER_BYTES + _CHECKSUM.size
    head = content[place : place + _LENGTH.size]
    length = int(_LENGTH.unpack(head)[0])
    if masked_checksum(head) != _CHECKSUM.unpack_from(content, place + _LENGTH.size)[0] or length > _MAX_RECORD:
        raise Damaged("the length of a record does not match its checksum, or is too large")
    return place + _HEADER_BYTES + length + _CHECKSUM.size


def masked_checksum(content: bytes) -> int:
    """CRC-32C, rotated and shifted so that a checksum of checksums does not cancel out."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))


# --- messages ---------------------------------------------------------------------------------------------------

_Field = int | bytes


def _of_event(record: bytes) -> Iterator[Scalar]:
    time_unix, step = 0.0, 0
    summaries: list[bytes] = []
    for number, value in _fields(record):
        if number == _EVENT_TIME and isinstance(value, bytes):
            time_unix = _float(value)
        elif number == _EVENT_STEP and isinstance(value, int):
            step = _signed(value)
        elif number == _EVENT_SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == _SUMMARY_VALUE and isinstance(value, bytes):
                yield from _of_value(value, step, time_unix)


def _of_value(message: bytes, step: int, time_unix: float) -> Iterator[Scalar]:
    """Nothing for an image, a histogram or a text."""
    tag = ""
    number: float | None = None
    for field, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if field == _VALUE_TAG:
            tag = value.decode("utf-8", "replace")
        elif field == _VALUE_SIMPLE and len(value) == _FIXED_SIZES[_FIXED32]:
            number = _float(value)
        elif field == _VALUE_TENSOR:
            number = _of_tensor(value)
    if number is not None:
        yield Scalar(tag, step, time_unix, number)


# DataType → its struct format in tensor_content, and the field that holds it otherwise.
_TYPES = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10)}


def _of_tensor(message: bytes) -> float | None:
    """The value of a scalar tensor of floats or integers; None for any other."""
    fields = list(_fields(message))
    kind = next((value for number, value in fields if number == _TENSOR_TYPE), 0)
    shape = next((value for number, value in fields if number == _TENSOR_SHAPE), b"")
    if not isinstance(kind, int) or kind not in _TYPES or shape:
        return None
    layout, own_field = _TYPES[kind]
    for number, value in fields:
        if number == _TENSOR_CONTENT and isinstance(value, bytes):
            is_one = len(value) == struct.calcsize(layout)
            return float(struct.unpack(layout, value)[0]) if is_one else None
        if number == own_field:
            return _first(value, layout)
    return 0.0  # protobuf does not write a zero


def _first(value: _Field, layout: str) -> float | None:
    """The first value of a repeated field, packed or not."""
    if isinstance(value, int):
        return float(_signed(value))
    if layout in ("<i", "<q"):
        return float(_signed(_varint(value, 0)[0])) if value else None
    size = struct.calcsize(layout)
    return float(struct.unpack(layout, value[:size])[0]) if len(value) >= size else None


def _fields(message: bytes) -> Iterator[tuple[int, _Field]]:
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
        else:
            raise Damaged(f"a field of kind {kind}")
        if place + size > len(message):
            raise Damaged("a field is longer than its message")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number, and where it ends."""
    result = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        result |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return result & (2**64 - 1), place
    raise Damaged("an unterminated number")


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _float(content: bytes) -> float:
    layouts = {4: "<f", 8: "<d"}
    return float(struct.unpack(layouts[len(content)], content)[0]) if len(content) in layouts else math.nan
