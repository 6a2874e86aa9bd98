"""Writes files as TensorBoard and Weights & Biases do, by the definition of their formats."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping

from ugro.features.trackers.tfevents import masked

_BLOCK = 32 << 10

def varint(number: int) -> bytes:
    number %= 2**64
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def fixed(number: int, layout: str, value: float) -> bytes:
    return varint(number << 3 | (1 if layout == "<d" else 5)) + struct.pack(layout, value)


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    checks = [struct.pack("<I", masked(part)) for part in (length, content)]
    return length + checks[0] + content + checks[1]


def event(tag: str, step: int, value: bytes) -> bytes:
    summary = field(1, field(1, tag.encode()) + value)
    return record(fixed(1, "<d", 1.5) + field(2, step) + field(5, summary))


def simple(tag: str, step: int, value: float) -> bytes:
    return event(tag, step, fixed(2, "<f", value))


# --- TensorBoard ------------------------------------------------------------------------------------------------


def tensor_scalar(tag: str, step: int, value: float) -> bytes:
    """As TensorFlow 2 writes it."""
    return event(tag, step, field(8, field(1, 1) + field(2, b"") + field(4, struct.pack("<f", value))))


def hparams(given: Mapping[str, float | str]) -> bytes:
    entries = b""
    for name, value in given.items():
        kind = field(3, value.encode()) if isinstance(value, str) else fixed(2, "<d", value)
        entries += field(1, field(1, name.encode()) + field(2, kind))
    metadata = field(9, field(1, field(1, b"hparams") + field(2, field(3, entries))))
    return event("_hparams_/session_start_info", 0, metadata)


# --- Weights & Biases -------------------------------------------------------------------------------------------


def history(step: int, values: Mapping[str, object], time_s: float = 1.5) -> bytes:
    items = b"".join(_item(2, name, value) for name, value in {**values, "_timestamp": time_s}.items())
    return field(2, items + field(2, field(1, step) if step else b""))


def config(given: Mapping[str, object]) -> bytes:
    return field(17, field(1, b"ab12") + field(4, b"".join(_item(1, name, value) for name, value in given.items())))


def _item(key: int, name: str, value: object) -> bytes:
    names = b"".join(field(key, part.encode()) for part in name.split("."))
    return field(1, names + field(16, json.dumps(value).encode()))


def wandb_file(*records: bytes) -> bytes:
    content = b":W&B\xe1\xbe\x00"
    for one in records:
        content += _framed(one, len(content))
    return content


def _framed(record: bytes, offset: int) -> bytes:
    """A record in fragments, none of which crosses the end of a block."""
    out, is_first = b"", True
    while is_first or record:
        left = _BLOCK - (offset + len(out)) % _BLOCK
        if left < 7:
            out += bytes(left)
            continue
        part, record = record[: left - 7], record[left - 7 :]
        kind = bytes([{(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not record]])
        out += struct.pack("<IH", zlib.crc32(kind + part), len(part)) + kind + part
        is_first = False
    return out
