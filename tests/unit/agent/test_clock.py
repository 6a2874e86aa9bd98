"""The agent's clock: who is told when it was set, and what waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.stores import store_at
from ugro.kernel.agent.clock import Clock, ClockWatch
from ugro.kernel.agent.rules import DAY_S, Jump, Memory
from ugro.kernel.support import moments as machine


def seen_before_a_jump(by_s: float) -> Memory:
    """As if the wall clock had been set by so much since."""
    now = machine.now()
    return Memory(replace(now, wall_s=now.wall_s - by_s))


def test_a_jump_that_a_thread_notices_is_told_later_and_once() -> None:
    clock, told = Clock(), list[Jump]()
    clock.listen(told.append)
    clock.memory = seen_before_a_jump(7200.0)
    assert not clock.may_remove()
    assert told == []
    clock.tell()
    clock.look()
    clock.tell()
    assert [jump.by_s for jump in told] == pytest.approx([7200.0], abs=1.0)


def test_removals_go_on_when_there_was_time_to_correct_the_clock() -> None:
    clock = Clock()
    clock.memory = seen_before_a_jump(7200.0)
    assert not clock.may_remove()
    held = clock.memory.held
    assert held is not None
    clock.memory = replace(clock.memory, held=replace(held, boot_s=held.boot_s - DAY_S - 1))
    assert not clock.may_remove(2 * DAY_S)
    assert clock.may_remove()
    assert clock.memory.held is None


def test_the_next_agent_says_what_happened_in_between_and_still_holds_what_was_held(tmp_path: Path) -> None:
    async def life(memory: Memory | None) -> list[str]:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            if memory is not None:
                await store.clock.write(memory)
            watch = ClockWatch(clock := Clock(), store, lambda: 0.0)
            await watch.start()
            assert watch.may_remove() is (memory is None and clock.memory.held is None)
            return [event.text for event in await store.jobs.newest_events(10)]
        finally:
            await store.close()

    assert asyncio.run(life(None)) == []
    [said] = asyncio.run(life(seen_before_a_jump(7200.0)))
    assert said.startswith("this machine's clock was set forward by 2h; time limits and pauses are not changed")
    assert said.endswith("nothing old is removed for 1d")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"seen": {"wall_s": "x"}}'])
def test_what_is_known_of_the_clock_is_not_needed(tmp_path: Path, content: str) -> None:
    async def work() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            query = "INSERT INTO meta (key, value) VALUES ('clock', ?)"
            await store._database.run(lambda db: db.execute(query, (content,)))
            assert await store.clock.read() is None
        finally:
            await store.close()

    asyncio.run(work())
