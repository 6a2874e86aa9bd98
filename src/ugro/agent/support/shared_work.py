"""Work that several callers want at the same time: done once, and cancelled when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass(slots=True)
class _UnderWay(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SharedWork(Generic[K, T]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: dict[K, _UnderWay[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``work`` returns or raises; that of somebody else, if the same is under way."""
        one = self._under_way.get(key)
        if one is None:
            one = self._under_way[key] = _UnderWay(asyncio.create_task(work(), name=f"{self._name} {key}"))
            one.task.add_done_callback(lambda _: self._leave(key, one))
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting and not one.task.done():
                self._leave(key, one)  # the next caller does not get the one that is being cancelled
                one.task.cancel()

    async def close(self) -> None:
        tasks = [one.task for one in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, key: K, one: _UnderWay[T]) -> None:
        if self._under_way.get(key) is one:
            del self._under_way[key]
