"""Additions to asyncio: tasks that fail together, restarted tasks, threads that outlast a cancelled caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_RESTART_S = 5.0


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


async def keep_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs work again if a bug ends it: the error is logged, and everything else goes on."""
    while True:
        task = asyncio.create_task(work(), name=work.__qualname__)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if (bug := task.exception()) is not None:
            log.error("%s failed and is started again", work.__qualname__, exc_info=bug)
        await asyncio.sleep(_RESTART_S)


async def to_the_end(work: Callable[[], T]) -> T:
    """Runs work in a thread. A cancelled caller still waits for it, so its files are not closed or moved meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
