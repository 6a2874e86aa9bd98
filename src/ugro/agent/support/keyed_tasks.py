"""Background tasks by key. A key that is already running is not started again; one that failed rests first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

Key = tuple[object, ...]
_LONGEST_REST_S = 60.0


class KeyedTasks:
    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failures: dict[Key, int] = {}  # in a row
        self._resting: dict[Key, asyncio.TimerHandle] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def do(self, key: Key, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key in self._tasks or key in self._resting:
            return
        task = asyncio.create_task(work(), name=" ".join(str(part) for part in key))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    def cancel(self, key: Key) -> None:
        """The task is done once its key is no longer in here."""
        if key in self._tasks:
            self._tasks[key].cancel()

    def cancel_all(self, *kinds: str) -> None:
        """Those whose keys begin with one of these words."""
        for key in [key for key in self._tasks if key[0] in kinds]:
            self.cancel(key)

    async def close(self) -> None:
        for timer in self._resting.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._rest(key)
        else:
            self._failures.pop(key, None)
            self._on_done()

    def _rest(self, key: Key) -> None:
        """After a bug or a full disk: the key may run again after a growing pause."""
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        pause_s = min(_LONGEST_REST_S, 2.0 ** min(failures - 1, 10))
        self._resting[key] = asyncio.get_running_loop().call_later(pause_s, self._wake_up, key)

    def _wake_up(self, key: Key) -> None:
        del self._resting[key]
        self._on_done()
