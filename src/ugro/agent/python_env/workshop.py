"""Folders to work in: beside what is kept, removed afterwards, also those that an agent before us left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ugro.agent.support.aio import to_the_end

_PREFIX = ".work-"


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cleaning = asyncio.Lock()
        self._is_clean = False

    @asynccontextmanager
    async def work(self) -> AsyncIterator[Path]:
        """An empty folder. It may come to hold a hundred thousand files, so it is removed in a thread."""
        async with self._cleaning:
            if not self._is_clean:
                await to_the_end(self._clean)
                self._is_clean = True
        path = Path(tempfile.mkdtemp(dir=self.folder, prefix=_PREFIX))
        try:
            yield path
        finally:
            await to_the_end(lambda: shutil.rmtree(path, ignore_errors=True))

    def _clean(self) -> None:
        """One agent has the folder, and it has not begun anything yet."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.folder.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
