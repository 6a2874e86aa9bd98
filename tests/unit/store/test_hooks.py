"""Deliveries on disk: in order, bounded, and together with the place in the events that they are about."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.rig.stores import in_store
from ugro.features.hooks.model import DeliveryState, HookName
from ugro.features.hooks.store import MOST_OVER, MOST_WAITING, NewDelivery
from ugro.kernel.store.database import Store


def new(number: int, hook: HookName = HookName.JOB_ENDED, *, is_test: bool = False) -> NewDelivery:
    return NewDelivery(f"{hook}-{number}", hook, f'{{"n":{number}}}', is_test)


def test_deliveries_wait_in_order_until_they_are_over(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        hooks = store.hooks
        assert await hooks.add([new(1), new(2)])
        assert await hooks.add([new(1, HookName.IDLE, is_test=True)])
        first = await hooks.next(HookName.JOB_ENDED)
        assert first is not None
        await hooks.tried(first, DeliveryState.WAITING, "answered 500")
        again = await hooks.next(HookName.JOB_ENDED)
        assert again is not None
        assert (again.id, again.body, again.tries, again.error) == (first.id, first.body, 1, "answered 500")
        await hooks.tried(again, DeliveryState.DELIVERED)
        second = await hooks.next(HookName.JOB_ENDED)
        assert second is not None
        assert second.id == "job_ended-2"
        assert await hooks.waiting() == {"job_ended": 1, "idle": 1}
        assert len(await hooks.calls(HookName.JOB_ENDED, 9)) == 2
        assert await hooks.calls(HookName.IDLE, 9) == [], "a test does not count"

    in_store(tmp_path, work)


def test_a_full_queue_takes_nothing_and_moves_no_place(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        hooks = store.hooks
        assert await hooks.start_after(5) == 5
        assert await hooks.add([new(number) for number in range(MOST_WAITING)], seen_until=7)
        assert not await hooks.add([new(-1)], seen_until=9)
        assert await hooks.start_after(99) == 7, "an agent that is started again goes on from there"
        assert await hooks.add([new(1, HookName.IDLE)]), "other hooks have room"
        await hooks.stop_following()
        assert await hooks.start_after(99) == 99

    in_store(tmp_path, work)


def test_only_the_newest_of_those_that_are_over_stay(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        hooks = store.hooks
        await hooks.add([new(number) for number in range(MOST_OVER + 20)])
        over = await hooks.newest(10_000)
        await asyncio.gather(*(hooks.tried(one, DeliveryState.DELIVERED) for one in over))
        await hooks.add([new(-1)])
        assert len(await hooks.newest(10_000)) == MOST_OVER + 1
        assert (await hooks.newest(1))[0].id == "job_ended--1"

    in_store(tmp_path, work)
