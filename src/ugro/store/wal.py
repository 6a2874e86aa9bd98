"""SQLite's write-ahead log, looked at from outside: SQLite itself silently skips a log, or the end of one, that is bad.

The last acknowledged changes are in it. Whether some are missing follows from its index (``-shm``), which an agent that
was killed leaves behind: SQLite counts a change there after it is on disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = (0x377F0682, 0x377F0683)
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_INDEX_BYTES = 100
_INDEX_VERSION = 3007000
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_MOST_FRAMES = 200_000  # that are looked at


@dataclass(frozen=True, slots=True)
class WalIndex:
    salts: bytes
    frames: int  # valid ones
    copied: int  # those of them that are in the database file


def index_bytes(database: Path) -> bytes:
    """To be read before SQLite opens the database, which empties it."""
    try:
        return beside(database, "-shm").read_bytes()
    except OSError:
        return b""


def put_back(database: Path, index: bytes) -> None:
    """What it proves is there for the next look, too. Nothing has the database open."""
    if index:
        beside(database, "-shm").write_bytes(index)


def parse_index(index: bytes) -> WalIndex | None:
    """None: it says nothing."""
    if len(index) < _INDEX_BYTES or index[:48] != index[48:96]:  # written in the middle of a change
        return None
    version, is_ready, frames = struct.unpack("=I8x?3xI", index[:20])
    if version != _INDEX_VERSION or not is_ready:
        return None
    return WalIndex(index[32:40], frames, struct.unpack("=I", index[96:100])[0])


def beside(database: Path, ending: str) -> Path:
    return database.with_name(database.name + ending)


def lost_changes(database: Path, before: WalIndex | None) -> str | None:
    """What is wrong with the log of a database that SQLite has just opened, or None.

    ``before``: the index that the last agent left.
    """
    now = parse_index(index_bytes(database))
    valid_frames = now.frames if now is not None else 0
    name = beside(database, "-wal").name
    try:
        with beside(database, "-wal").open("rb") as log:
            size, header = os.fstat(log.fileno()).st_size, log.read(_HEADER_BYTES)
            salts = _salts(header)
            if salts is None and header.strip(b"\0"):
                return f"{name} is not its log"
            if before is not None and salts in (None, before.salts) and _has_more(before, valid_frames):
                return f"{name} has lost its last changes"
            if salts is not None and _commits_after(log.fileno(), size, header, valid_frames) > 1:
                return f"{name} is damaged in the middle"
    except FileNotFoundError:
        if before is not None and _has_more(before, 0):
            return f"{name} is missing, and the last changes with it"
    return None


def _has_more(index: WalIndex, valid_frames: int) -> bool:
    return index.frames > index.copied and index.frames > valid_frames


def _salts(header: bytes) -> bytes | None:
    """None: this is no header of a log."""
    if len(header) < _HEADER_BYTES:
        return None
    magic, page_bytes = struct.unpack(">I4xI", header[:12])
    return header[16:24] if magic in _MAGIC and page_bytes in _PAGE_SIZES else None


def _commits_after(log: int, size: int, header: bytes, valid_frames: int) -> int:
    """Ends of transactions after the last valid frame.

    A power cut leaves one at most, because each is on disk before the next begins.
    """
    later = _frames(log, size, header, valid_frames)
    return sum(1 for salts, is_commit in later if is_commit and salts == header[16:24])


def _frames(log: int, size: int, header: bytes, first: int) -> Iterator[tuple[bytes, bool]]:
    step = _FRAME_HEADER_BYTES + struct.unpack(">I", header[8:12])[0]
    for at in range(_HEADER_BYTES + first * step, size - step + 1, step)[:_MOST_FRAMES]:
        frame = os.pread(log, _FRAME_HEADER_BYTES, at)
        yield frame[8:16], frame[4:8] != b"\0\0\0\0"
