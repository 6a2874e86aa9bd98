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
        self._waiting: dict[str, list[tuple[T, asyncio.Future[R]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self, node: str, item: T) -> R:
        """A caller that is cancelled gets no result; its request is sent all the same."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        waiting = self._waiting.setdefault(node, [])
        waiting.append((item, done))
        if len(waiting) >= self._enough:
            self._flush(node)
        elif len(waiting) == 1:
            loop.call_later(self._gather_s, self._flush, node)
        return await done

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self, node: str) -> None:
        if waiting := self._waiting.pop(node, None):
            task = asyncio.create_task(self._send_all(node, waiting), name=f"{len(waiting)} requests to {node}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_all(self, node: str, waiting: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        results: Sequence[R | Exception]
        try:
            results = await self._send(node, [item for item, _ in waiting])
        except Exception as error:  # noqa: BLE001  # each caller has it raised
            results = [error] * len(waiting)
        for (_, done), result in zip(waiting, results, strict=True):
            if done.done():
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)
