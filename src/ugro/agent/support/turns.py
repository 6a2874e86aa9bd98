"""Costly work in turns: so much at once, and less of it for one user, so that nobody takes all of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from ugro.agent.support.caller import caller

_FOR: ContextVar[str] = ContextVar("for whom", default="")


@contextmanager
def working_for(user: str) -> Iterator[None]:
    """What the agent does by itself here, and what it starts for that, is for this user."""
    before = _FOR.set(user)
    try:
        yield
    finally:
        _FOR.reset(before)


class Turns:
    def __init__(self, most: int, *, of_one_user: int) -> None:
        self._most = most
        self._of_one_user = of_one_user
        self._taken: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """By the caller, or the user for whom the agent works."""
        asks = caller()
        user = asks.user if asks is not None else _FOR.get()
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(user))
            self._taken[user] += 1
        try:
            yield
        finally:
            self._taken[user] -= 1
            self._taken += Counter()  # without those who have none
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self, user: str) -> bool:
        return self._taken.total() < self._most and self._taken[user] < self._of_one_user
