"""Work that several want at once: done once, and only as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ugro.kernel.support.aio import SharedWork


def in_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(scenario)
    def test() -> None:
        asyncio.run(scenario())

    return test


class Work:
    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.may_end = asyncio.Event()

    async def run(self) -> int:
        self.begun += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.begun


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_all_who_ask_get_the_result_of_one() -> None:
    shared: SharedWork[str, int] = SharedWork("test")
    work = Work()
    tasks = [asyncio.create_task(shared.do("a", work.run)) for _ in range(3)]
    await settle()
    work.may_end.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert "a" not in shared


@in_loop
async def test_one_who_leaves_does_not_end_it_for_the_others_and_the_last_does() -> None:
    shared: SharedWork[str, int] = SharedWork("test")
    work = Work()
    first, second = (asyncio.create_task(shared.do("a", work.run)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert (work.cancelled, "a" in shared) == (0, True)
    second.cancel()
    await settle()
    assert (work.cancelled, "a" in shared) == (1, False)


@in_loop
async def test_who_asks_while_it_is_being_cancelled_gets_a_new_one() -> None:
    shared: SharedWork[str, int] = SharedWork("test")
    work = Work()
    first = asyncio.create_task(shared.do("a", work.run))
    await settle()
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(shared.do("a", work.run))
    await settle()
    work.may_end.set()
    assert await second == 2


@in_loop
async def test_an_error_reaches_everybody() -> None:
    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    shared: SharedWork[str, int] = SharedWork("test")
    found = await asyncio.gather(*(shared.do("a", fail) for _ in range(2)), return_exceptions=True)
    assert [str(one) for one in found] == ["no", "no"]
    with pytest.raises(ValueError, match="no"):
        await shared.do("a", fail)
