"""The journal of a study on disk: lines that are only ever added, each on disk before its writer is answered."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ugro.core.errors import UgroError
from ugro.policy.sweep.journal import MOST_OPERATION, Journal

_MOST_BYTES = 128 << 20  # all of it is in memory, too
_MOST_READ = 1 << 20  # in one answer


class JournalFile:
    """Blocks; used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal()
        self._lines: list[str] = []
        self._bytes = 0
        self._read()

    @property
    def count(self) -> int:
        return len(self._lines)

    def lines(self, start: int) -> list[str]:
        """From that number on; not all of them if they are many."""
        found: list[str] = []
        size = 0
        for line in self._lines[max(0, start) :]:
            size += len(line)
            if found and size > _MOST_READ:
                break
            found.append(line)
        return found

    def append(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """All of them are on disk when this returns. Raises ValueError if one is invalid: then none is added."""
        lines = [json.dumps(one, separators=(",", ":")) for one in operations]
        content = "".join(f"{line}\n" for line in lines).encode()
        if self._bytes + len(content) > _MOST_BYTES or any(len(line) > MOST_OPERATION for line in lines):
            raise ValueError(f"too large for a study: {len(content)} bytes")
        try:
            for one in operations:
                self.journal.apply(one)
            self._write(content)
        except (OSError, ValueError) as error:
            self._truncate()
            self._read()
            if isinstance(error, ValueError):
                raise
            raise UgroError(f"{self.path}: {(error.strerror or str(error)).lower()}") from error
        self._bytes += len(content)
        self._lines += lines

    def _write(self, content: bytes) -> None:
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, self._bytes)  # what an agent that was killed, or a full disk, left of a line
            os.lseek(file, 0, os.SEEK_END)
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        finally:
            os.close(file)

    def _truncate(self) -> None:
        """None of several lines counts if the disk was full after the first. The next writer tries it again."""
        with contextlib.suppress(OSError):
            os.truncate(self.path, self._bytes)

    def _read(self) -> None:
        """The rest of a line that an agent was killed in was answered to nobody: it does not count."""
        self.journal, self._lines = Journal(), []
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self._bytes = len(whole)
        for line in whole.decode().splitlines():
            try:
                self.journal.apply(json.loads(line))
            except ValueError as error:
                raise UgroError(f"{self.path}: line {len(self._lines) + 1}: {error}") from error
            self._lines.append(line)
