"""Reads the scalars of TensorBoard event files, without TensorFlow, TensorBoard or protobuf.

A file is a sequence of records, each with its length and two checksums. A record is an Event message; those with a
Summary contain named values. The file may still be written to: an incomplete record is left for the next read.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ugro.core.support import crc32c
from ugro.core.support.protobuf import FIXED32, FIXED_SIZES, Damaged, Field, fields, messages, signed, text, varint

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
    for record, checksum, computed in zip(records, checksums, crc32c.masked_all(checked), strict=True):
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
    is_valid = crc32c.masked(header[: _LENGTH.size]) == _CHECKSUM.unpack_from(header, _LENGTH.size)[0]
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
