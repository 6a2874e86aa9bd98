"""Reads the scalars of TensorBoard event files, without TensorFlow, TensorBoard or protobuf.

A file is a sequence of records, each with its length and two checksums. A record is an Event message; those with a
Summary contain named values. The file may still be written to: an incomplete record is left for the next read.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

# --- crc32c -----------------------------------------------------------------------------------------------------------
# CRC-32C, masked as TensorBoard's files have it: rotated and shifted, so that a checksum of checksums differs.
#
# Python's own libraries have no CRC-32C. Of many contents with the same length, all are computed at once: their first
# bytes, then their second ones, as rows of bytes that ``bytes.translate`` looks up and large integers combine.


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


# --- protobuf ---------------------------------------------------------------------------------------------------------
# Reads the fields of protobuf messages, without their descriptions and without protobuf.


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


# --- tfevents ---------------------------------------------------------------------------------------------------------


__all__ = ["Damaged", "HParams", "Scalar", "parse", "parse_all", "record_end"]

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_MAX_RECORD = 64 << 20  # these files also contain images and graphs
_LARGEST_CHECKED = 64 << 10  # larger records are images: their checksums would take seconds, and they have no scalars

# Field numbers of the messages (event.proto, summary.proto, tensor.proto, types.proto).
_EVENT_TIME, _EVENT_STEP, _EVENT_SUMMARY = 1, 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR, _VALUE_METADATA = 1, 2, 8, 9
_TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_CONTENT = 1, 2, 4

# Nearly all records: a time, a step unless it is zero, and one short tag with a simple value.
_USUAL = re.compile(
    rb"\x09(.{8})(?:\x10([\x80-\xff]{0,9}[\x00-\x7f]))?\x2a([\x00-\x7f])\x0a([\x00-\x7f])"
    rb"\x0a([\x00-\x7f])(.*)\x15(.{4})",
    re.DOTALL,
)
_DOUBLE, _SINGLE = struct.Struct("<d"), struct.Struct("<f")


class Scalar(NamedTuple):
    tag: str
    step: int
    time_unix: float
    value: float


class HParams(NamedTuple):
    """Hyperparameters, as a writer's ``add_hparams`` records them."""

    values: dict[str, str]


def parse(content: bytes) -> tuple[list[Scalar], int]:
    """The scalars of all complete records, and the size of those records in bytes.

    Raises ``Damaged`` if ``content`` does not begin with a record.
    """
    found, size = parse_all(content)
    return [one for one in found if isinstance(one, Scalar)], size


def parse_all(content: bytes) -> tuple[list[Scalar | HParams], int]:
    """The same, with hyperparameters."""
    records, checksums = _frames(content)
    found: list[Scalar | HParams] = []
    place = 0
    checked = [record if len(record) <= _LARGEST_CHECKED else b"" for record in records]
    for record, checksum, computed in zip(records, checksums, masked_all(checked), strict=True):
        if checksum != computed and len(record) <= _LARGEST_CHECKED:
            if place:
                break  # the next read begins here and raises
            raise Damaged("a record does not match its checksum")
        if (usual := _usual(record)) is not None:
            found.append(usual)
        else:
            with contextlib.suppress(Damaged):  # complete, but of an unknown kind
                found += _of_event(record)
        place += _HEADER_BYTES + len(record) + _CHECKSUM.size
    return found, place


def _frames(content: bytes) -> tuple[list[bytes], list[int]]:
    """The complete records, and their checksums."""
    records, checksums = [], []
    place, size, read = 0, len(content), _CHECKSUM.unpack_from
    while place + _HEADER_BYTES <= size:
        length = _length(content[place : place + _HEADER_BYTES])
        if length is None:
            if place:
                break  # the next read begins here and raises
            raise _bad_length()
        begin = place + _HEADER_BYTES
        place = begin + length + _CHECKSUM.size
        if place > size:
            break
        records.append(content[begin : begin + length])
        checksums.append(read(content, begin + length)[0])
    return records, checksums


def record_end(content: bytes, place: int = 0) -> int:
    """The end of the record that begins there; beyond ``content`` if the record is incomplete."""
    if place + _HEADER_BYTES > len(content):
        return place + _HEADER_BYTES + _CHECKSUM.size
    length = _length(content[place : place + _HEADER_BYTES])
    if length is None:
        raise _bad_length()
    return place + _HEADER_BYTES + length + _CHECKSUM.size


@lru_cache(maxsize=4096)  # there are few different lengths
def _length(header: bytes) -> int | None:
    length = int(_LENGTH.unpack_from(header)[0])
    is_valid = masked(header[: _LENGTH.size]) == _CHECKSUM.unpack_from(header, _LENGTH.size)[0]
    return length if is_valid and length <= _MAX_RECORD else None


def _bad_length() -> Damaged:
    return Damaged("the length of a record does not match its checksum, or is too large")


# --- messages ---------------------------------------------------------------------------------------------------


def _usual(record: bytes) -> Scalar | None:
    """The scalar of a record of the usual form, many times faster than by its fields; None: look at the fields."""
    found = _USUAL.fullmatch(record)
    if found is None:
        return None
    moment, step, summary, value, size, tag, number = found.groups()
    if not summary[0] - 2 == value[0] == size[0] + 7 == len(tag) + 7:
        return None
    return Scalar(_tag(tag), _step(step or b"\0"), _DOUBLE.unpack(moment)[0], _SINGLE.unpack(number)[0])


# The same few tags, and several tags at each step.
_tag = lru_cache(maxsize=4096)(text)


@lru_cache(maxsize=64)
def _step(content: bytes) -> int:
    return signed(varint(content, 0)[0])


def _of_event(record: bytes) -> Iterator[Scalar | HParams]:
    time_unix, step = 0.0, 0
    summaries: list[bytes] = []
    for number, value in fields(record):
        if number == _EVENT_TIME and isinstance(value, bytes):
            time_unix = _float(value)
        elif number == _EVENT_STEP and isinstance(value, int):
            step = signed(value)
        elif number == _EVENT_SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in fields(summary):
            if number == _SUMMARY_VALUE and isinstance(value, bytes):
                yield from _of_value(value, step, time_unix)


def _of_value(message: bytes, step: int, time_unix: float) -> Iterator[Scalar | HParams]:
    """Nothing for an image, a histogram or a text."""
    tag = ""
    number: float | None = None
    for field, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if field == _VALUE_TAG:
            tag = text(value)
        elif field == _VALUE_SIMPLE and len(value) == FIXED_SIZES[FIXED32]:
            number = _float(value)
        elif field == _VALUE_TENSOR:
            number = _of_tensor(value)
        elif field == _VALUE_METADATA and tag == _HPARAMS_TAG:
            yield HParams(dict(_hparams(value)))
    if number is not None and tag != _HPARAMS_TAG:
        yield Scalar(tag, step, time_unix, number)


# SummaryMetadata → plugin_data → content (HParamsPluginData) → session_start_info → hparams, a map to protobuf's Value.
_HPARAMS_TAG = "_hparams_/session_start_info"
_TO_HPARAMS = (1, 2, 3)
_NUMBER_VALUE, _TEXT_VALUE, _BOOLEAN_VALUE = 2, 3, 4


def _hparams(metadata: bytes) -> Iterator[tuple[str, str]]:
    for number in _TO_HPARAMS:
        metadata = next(messages(metadata, number), b"")
    for entry in messages(metadata, 1):
        name, value = next(messages(entry, 1), b""), next(messages(entry, 2), b"")
        for kind, content in fields(value):
            if kind == _TEXT_VALUE and isinstance(content, bytes):
                yield text(name), text(content)
            elif kind == _NUMBER_VALUE and isinstance(content, bytes):
                yield text(name), f"{_float(content):g}"
            elif kind == _BOOLEAN_VALUE:
                yield text(name), str(bool(content))


# DataType → its struct format in tensor_content, and the field that holds it otherwise.
_TYPES = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10)}


def _of_tensor(message: bytes) -> float | None:
    """The value of a scalar tensor of floats or integers; None for any other."""
    found = list(fields(message))
    kind = next((value for number, value in found if number == _TENSOR_TYPE), 0)
    shape = next((value for number, value in found if number == _TENSOR_SHAPE), b"")
    if not isinstance(kind, int) or kind not in _TYPES or shape:
        return None
    layout, own_field = _TYPES[kind]
    for number, value in found:
        if number == _TENSOR_CONTENT and isinstance(value, bytes):
            is_one = len(value) == struct.calcsize(layout)
            return float(struct.unpack(layout, value)[0]) if is_one else None
        if number == own_field:
            return _first(value, layout)
    return 0.0  # protobuf does not write a zero


def _first(value: Field, layout: str) -> float | None:
    """The first value of a repeated field, packed or not."""
    if isinstance(value, int):
        return float(signed(value))
    if layout in ("<i", "<q"):
        return float(signed(varint(value, 0)[0])) if value else None
    size = struct.calcsize(layout)
    return float(struct.unpack(layout, value[:size])[0]) if len(value) >= size else None


def _float(content: bytes) -> float:
    layouts = {4: "<f", 8: "<d"}
    return float(struct.unpack(layouts[len(content)], content)[0]) if len(content) in layouts else math.nan
