"""Reads the newest records of a training's metrics file of any size: its end, and a little of its beginning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ugro.core.training import Training, document, read

_BLOCK = 1 << 20
_MOST_BYTES = 16 << 20
_HEAD_BYTES = 64 << 10
_STEP = b'"profile"'
_OF_THE_BEGINNING = ("run", "model", "plan")


def read_end(path: Path, steps: int, *, block: int = _BLOCK, most_bytes: int = _MOST_BYTES) -> Training:
    """With that many of the newest steps, as far as they are in the last 16 MiB. Blocks; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end = os.fstat(fd).st_size
        begin, tail = _tail(fd, end, steps, block, most_bytes)
        head = os.pread(fd, min(_HEAD_BYTES, begin), 0)
    finally:
        os.close(fd)
    lines = tail.split(b"\n")
    return read([*_beginning(head), *(lines[1:] if begin else lines)])


def _tail(fd: int, end: int, steps: int, block: int, most_bytes: int) -> tuple[int, bytes]:
    blocks: list[bytes] = []
    begin, found = end, 0
    while begin > 0 and found <= steps and end - begin < most_bytes:
        size = min(block, begin)
        begin -= size
        blocks.append(os.pread(fd, size, begin))
        found += blocks[-1].count(_STEP)
    return begin, b"".join(reversed(blocks))


def _beginning(head: bytes) -> Iterator[bytes]:
    """The description of the ranks is written once. The last line may be incomplete."""
    for line in head.split(b"\n")[:-1]:
        record = document(line)
        if record is not None and record.get("kind") in _OF_THE_BEGINNING:
            yield line
