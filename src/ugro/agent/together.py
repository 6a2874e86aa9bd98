"""Work that is done at once and stands or falls together, with an error as if there had been only one piece of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def one_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group; when one of its tasks fails the others are given up, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    async with one_error() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]
