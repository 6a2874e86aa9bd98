"""Marks: how far the state has come, sealed, on every node and in a file beside the state."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ugro.core.safe_mode import Mark
from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.core.support.seal import sealed, unsealed
from ugro.store.backup import write_whole


def write_mark(key: bytes, mark: Mark) -> str:
    return sealed(key, dumps(mark))


def read_mark(key: bytes, agent: str, message: object) -> Mark | None:
    """None for one that is not proven to be ours: it shows nothing."""
    text = unsealed(key, message)
    if text is None:
        return None
    with contextlib.suppress(ValueError, DecodeError):
        mark = decode(Mark, json.loads(text))
        return mark if mark.agent == agent else None
    return None


class MarkFile:
    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key

    def read(self, agent: str) -> Mark | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read_mark(self._key, agent, self._path.read_text())
        return None

    def write(self, mark: Mark) -> None:
        """Lasts when this returns. Blocks."""
        write_whole(self._path, write_mark(self._key, mark).encode())
