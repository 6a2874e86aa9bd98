"""Requests to a node that are made at about the same time travel in one message; each gets its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST_AT_ONCE = 250


class Batcher(Generic[T, R]):
    """``send`` is given a node and what goes there: a result for each, or the error that is raised for it.

    What comes within ``gather_s`` is sent together, and at once when ``enough`` have come.
    """

    def __init__(
        self,
        send: Callable[[str, Sequence[T]], Awaitable[Sequence[R | Exception]]],
        gather_s: float = 0.0,
        enough: int = _MOST_AT_ONCE,
    ) -> None:
        self._send = send
        self._gather_s = gather_s
        self._enough = enough
        self._open: dict[str, _Batch[T, R]] = {}  # by node: those that still take requests
        self._tasks: set[asyncio.Task[Sequence[R | Exception]]] = set()

    async def request(self, node: str, item: T) -> R:
        """A caller that is cancelled gets no result; its request is sent all the same."""
        batch = self._open.get(node)
        if batch is None:
            batch = self._open[node] = _Batch()
            batch.task = asyncio.create_task(self._run(node, batch), name=f"requests to {node}")
            self._tasks.add(batch.task)
            batch.task.add_done_callback(self._note_end)
        batch.items.append(item)
        number = len(batch.items) - 1
        if len(batch.items) >= self._enough:
            self._close(node, batch)
        assert batch.task is not None
        result = (await asyncio.shield(batch.task))[number]
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, node: str, batch: _Batch[T, R]) -> Sequence[R | Exception]:
        timer = asyncio.get_running_loop().call_later(self._gather_s, self._close, node, batch)
        try:
            await batch.is_complete.wait()
        finally:
            timer.cancel()
            self._close(node, batch)
        return await self._send(node, batch.items)

    def _close(self, node: str, batch: _Batch[T, R]) -> None:
        """Later requests go into another batch."""
        if self._open.get(node) is batch:
            del self._open[node]
        batch.is_complete.set()

    def _note_end(self, task: asyncio.Task[Sequence[R | Exception]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen: every caller may have been cancelled


class _Batch(Generic[T, R]):
    def __init__(self) -> None:
        self.items: list[T] = []
        self.is_complete = asyncio.Event()
        self.task: asyncio.Task[Sequence[R | Exception]] | None = None
