"""History and configuration of Weights & Biases runs, from their ``run-*.wandb`` files.

A file is a header and blocks of 32 KiB. A record is a fragment, or several in consecutive blocks; a fragment does not
cross the end of its block. After damage, reading goes on with the next block.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from ugro.features.trackers.tfevents import Damaged, fields, messages, signed, text
from ugro.kernel.telemetry.readers import AT_ONCE, LARGEST, Origin, Piece, Reading, real
from ugro.node import foreign

_MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32 << 10
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_KIND_AT = 6  # the checksum is of the kind and the content
_DAMAGED_BLOCK, _WHOLE, _FIRST, _LAST = 0, 1, 2, 4
_DAMAGED = "damaged"
_LARGEST_VALUE = 64 << 10
_DEEPEST = 4

# Field numbers (wandb_internal.proto).
_HISTORY, _CONFIG, _RUN, _RUN_CONFIG = 2, 5, 17, 4
_ITEM, _STEP, _STEP_NUMBER = 1, 2, 1
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16


def read(piece: Piece) -> Reading:
    begin = 0
    if piece.offset == 0:
        if len(piece.content) < len(_MAGIC):
            return Reading()
        begin = len(_MAGIC)
    if piece.state == _DAMAGED or (begin and not piece.content.startswith(_MAGIC[:4])):
        return Reading(end=len(piece.content), state=_DAMAGED)
    reading = Reading(end=begin)
    for record, end in _records(piece, begin):
        reading.end = end
        try:
            _add(reading, record)
        except Damaged:
            continue
    if reading.end == begin and len(piece.content) >= AT_ONCE:
        # One enormous record: its rest, which begins with a block, is skipped as well.
        reading.end = len(piece.content) - (piece.offset + len(piece.content)) % _BLOCK
    return reading


def _records(piece: Piece, place: int) -> Iterator[tuple[bytes, int]]:
    """Each record with the place after it; an empty one for a damaged block."""
    parts: list[bytes] | None = None
    for kind, part, end in _fragments(piece, place):
        if kind in (_WHOLE, _FIRST):
            parts = []
        if kind == _DAMAGED_BLOCK:
            parts = None
            yield b"", end
        elif parts is not None:
            parts.append(part)
            if kind in (_WHOLE, _LAST):
                yield b"".join(parts), end
                parts = None


def _fragments(piece: Piece, place: int) -> Iterator[tuple[int, bytes, int]]:
    """The kind and content of each complete fragment, and the place after it."""
    content = piece.content
    while place < len(content):
        left = _BLOCK - (piece.offset + place) % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        if place + _HEADER.size > len(content):
            return
        checksum, size, kind = _HEADER.unpack_from(content, place)
        end = place + _HEADER.size + size
        is_possible = size + _HEADER.size <= left and _WHOLE <= kind <= _LAST
        if is_possible and end > len(content):
            return
        if is_possible and zlib.crc32(content[place + _KIND_AT : end]) == checksum:
            yield kind, content[place + _HEADER.size : end], end
            place = end
        else:
            place += left
            if place <= len(content):
                yield _DAMAGED_BLOCK, b"", place


def _add(reading: Reading, record: bytes) -> None:
    for field, message in fields(record):
        if not isinstance(message, bytes):
            continue
        if field == _HISTORY:
            _add_history(reading, message)
        elif field == _CONFIG:
            _add_config(reading, message)
        elif field == _RUN:
            for config in messages(message, _RUN_CONFIG):
                _add_config(reading, config)


def _add_history(reading: Reading, message: bytes) -> None:
    values = dict(_items(message))
    step = next((_step(one) for one in messages(message, _STEP)), None)
    if step is None:
        own = real(values.get("_step")) or 0.0
        step = int(own) if abs(own) < LARGEST else 0  # false for NaN
    time_s = real(values.get("_timestamp")) or 0.0
    for name, value in values.items():
        if not name.startswith("_") and (found := real(value)) is not None:
            reading.add(Origin.WANDB, name, step, time_s, found)


def _step(message: bytes) -> int:
    """Protobuf does not write a zero."""
    return next((signed(value) for field, value in fields(message) if field == _STEP_NUMBER and type(value) is int), 0)


def _add_config(reading: Reading, message: bytes) -> None:
    items = ((name, value) for name, value in _items(message) if not name.startswith("_"))
    reading.add_parameters((name, value if isinstance(value, str) else json.dumps(value)) for name, value in items)


def _items(message: bytes) -> Iterator[tuple[str, Any]]:
    """Names and values, nested ones with a dot as its own pages show them."""
    for item in messages(message, _ITEM):
        key, value = "", b""
        nested: list[str] = []
        for field, content in fields(item):
            if isinstance(content, bytes):
                if field == _KEY:
                    key = text(content)
                elif field == _NESTED_KEY and len(nested) <= _DEEPEST:
                    nested.append(text(content))
                elif field == _VALUE:
                    value = content
        yield from _flat(".".join(nested) or key, _parsed(value), 0)


def _parsed(value: bytes) -> Any:
    try:
        return foreign.parsed(value, _LARGEST_VALUE)
    except ValueError:
        return None


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if depth < _DEEPEST and "_type" not in value:  # not an image or a histogram
            for inner, one in value.items():
                yield from _flat(f"{name}.{inner}", one, depth + 1)
    elif value is not None:
        yield name, value
