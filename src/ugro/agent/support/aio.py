"""Small additions to asyncio: work that succeeds or fails together, threads that a cancelled caller still waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def one_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that cancels the others when one task fails, and raises that task's error itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    async with one_error() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


async def to_the_end(work: Callable[[], T]) -> T:
    """Runs work in a thread. A cancelled caller still waits for it: nobody may close or move a file under it."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
