"""For scripts that write TensorBoard's event files: their scalars, read while they are written."""

from __future__ import annotations

from pathlib import Path

from ugro.core.support.tfevents import Scalar, parse, record_end

_AT_ONCE = 4 << 20


def scalars(path: Path, offset: int = 0) -> tuple[list[Scalar], int]:
    """Those behind ``offset``, as far as they are whole, and where the next look begins.

    Much takes several looks: until one does not move on. Raises ``Damaged`` at bytes that are no record.
    """
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(_AT_ONCE)
        if len(content) == _AT_ONCE:  # a picture may be larger than that
            content += file.read(max(0, record_end(content) - len(content)))
    found, size = parse(content)
    return found, offset + size
