"""Pieces of work under way, each once: asked for again meanwhile, it just goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

Key = tuple[object, ...]


class Work:
    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def do(self, key: Key, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key in self._tasks:
            return
        task = asyncio.create_task(work(), name=" ".join(str(part) for part in key))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
        self._on_done()
