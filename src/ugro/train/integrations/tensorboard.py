"""Reads scalars from TensorBoard event files, also while they are written."""

from __future__ import annotations

from pathlib import Path

from ugro.core.support.tfevents import Scalar, parse, record_end

_AT_ONCE = 4 << 20


def scalars(path: Path, offset: int = 0) -> tuple[list[Scalar], int]:
    """The complete scalars after ``offset``, and the offset for the next call.

    A large file needs several calls, until the offset does not advance. Raises ``Damaged`` at invalid bytes.
    """
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(_AT_ONCE)
        if len(content) == _AT_ONCE:  # an image may be larger
            content += file.read(max(0, record_end(content) - len(content)))
    found, size = parse(content)
    return found, offset + size
