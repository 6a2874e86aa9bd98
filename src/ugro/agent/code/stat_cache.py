"""The hashes of files that were read before: an unchanged file is not read again.

A file is identified by device, inode, size and the times of its last changes. One that changed so shortly before it was
read that a second change could carry the same time is not cached.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

# The resolution of times on a disk, and on those that store whole seconds only.
_TICK_NS = 20_000_000
_COARSE_NS = 2_000_000_000
_SECOND_NS = 1_000_000_000
_MOST = 500_000
_MAKE = """CREATE TABLE IF NOT EXISTS files (
    device INTEGER, inode INTEGER, size INTEGER, modified INTEGER, changed INTEGER, body BLOB,
    PRIMARY KEY (device, inode)) WITHOUT ROWID"""

Known = tuple[int, int, int, bytes]  # size, modified, changed, body


class StatCache:
    """Not thread-safe. If it is lost, files are read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, int], Known] | None = None
        self._fresh: set[tuple[int, int]] = set()

    def find(self, status: os.stat_result, *, trusts_times: bool) -> bytes | None:
        """The hashes of its chunks. ``trusts_times``: size and modification time are enough."""
        known = self._all().get((status.st_dev, status.st_ino))
        if known is None or known[0] != status.st_size or known[1] != status.st_mtime_ns:
            return None
        return known[3] if trusts_times or known[2] == status.st_ctime_ns else None

    def note(self, status: os.stat_result, body: bytes, read_at_ns: int) -> bool:
        """False: it was not cached. ``read_at_ns``: the time before the first byte was read."""
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        if changed > read_at_ns - (_TICK_NS if changed % _SECOND_NS else _COARSE_NS):
            return False
        key = (status.st_dev, status.st_ino)
        self._all()[key] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, body)
        self._fresh.add(key)
        return True

    def save(self) -> None:
        if not self._fresh:
            return
        known = self._all()
        if len(known) > _MOST:  # most of them of files that no longer exist
            known = self._known = {key: known[key] for key in self._fresh}
            self._path.unlink(missing_ok=True)
        rows = [(*map(_signed, key), *known[key]) for key in self._fresh if max(known[key][:3]) < 1 << 63]
        self._fresh = set()
        try:
            with self._open() as db:
                db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.close()
        except sqlite3.Error:
            self._path.unlink(missing_ok=True)

    def _all(self) -> dict[tuple[int, int], Known]:
        if self._known is None:
            self._known = self._load()
        return self._known

    def _load(self) -> dict[tuple[int, int], Known]:
        try:
            db = self._open()
            rows = db.execute("SELECT device, inode, size, modified, changed, body FROM files").fetchall()
            db.close()
        except sqlite3.Error:
            self._path.unlink(missing_ok=True)
            return {}
        return {(_unsigned(row[0]), _unsigned(row[1])): row[2:] for row in rows}

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=5.0)
        db.execute("PRAGMA synchronous = OFF")  # losing it costs only time
        db.execute(_MAKE)
        return db


def now_ns() -> int:
    return time.time_ns()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number
