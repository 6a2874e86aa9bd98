"""Who watches the agent's loop: it speaks for one that stands, for a while, and says where it stands."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tests.rig.waiting import wait_until
from ugro.kernel.agent.loop_watch import LoopWatch

LIMIT_S = 30


async def stand(watch: LoopWatch) -> None:
    """Nothing is awaited: nobody else runs in this loop."""
    wait_until(lambda: watch.last, LIMIT_S, "somebody to notice")


def test_a_loop_that_stands_is_spoken_for_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    spoken: list[float] = []

    async def work() -> None:
        watch = LoopWatch()
        watch.start(lambda: spoken.append(time.monotonic()))
        await stand(watch)
        assert len(spoken) >= 2
        async with asyncio.timeout(LIMIT_S):
            while "goes on" not in caplog.text:  # noqa: ASYNC110  # a thread says it
                await asyncio.sleep(0.05)
        watch.stop()
        assert watch.last is not None
        assert watch.last.seconds > 1
        assert "stand (" in watch.last.where
        assert "test_loop_watch.py" in watch.last.where

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert caplog.text.count("has stood still") == 1


def test_after_a_while_nobody_speaks_for_it_any_more() -> None:
    spoken: list[float] = []

    async def work() -> None:
        watch = LoopWatch(speaks_for_s=0.0)
        watch.start(lambda: spoken.append(time.monotonic()))
        await stand(watch)
        watch.stop()

    asyncio.run(work())
    assert not spoken


def test_a_loop_that_goes_on_is_left_alone() -> None:
    spoken: list[float] = []

    async def work() -> None:
        watch = LoopWatch()
        watch.start(lambda: spoken.append(time.monotonic()))
        for _ in range(20):
            await asyncio.sleep(0.02)
        watch.stop()
        assert watch.last is None

    asyncio.run(work())
    assert not spoken
