from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from ugro.features.services.inference.guard import Metrics, Refused
from ugro.features.services.inference.options import Limits
from ugro.features.services.inference.service import Batcher

LIMIT_S = 60
FAR = 1000.0 * LIMIT_S  # ms: a batch that is not full would wait until the test is over


class Doubling:
    """A model that doubles numbers, fails with texts, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.began, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()

    def predict(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.began.set()
        self.may_go.wait(LIMIT_S)
        return [item * 2 for item in items if item + 0 is not None]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


class Batching:
    """A batcher that runs while the block does."""

    def __init__(self, model: Any, **limits: Any) -> None:
        self.batcher = Batcher(model, Limits(**limits), Metrics())

    async def __aenter__(self) -> Batcher:
        self._running = asyncio.create_task(self.batcher.run())
        return self.batcher

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()


def test_requests_that_arrive_together_are_computed_together() -> None:
    async def main() -> None:
        model = Doubling()
        async with Batching(model, max_batch=4, batch_wait_ms=FAR) as batcher:
            found = await asyncio.gather(*(batcher.submit([number]) for number in range(4)))
        assert found == [[0], [2], [4], [6]]
        assert model.batches == [[0, 1, 2, 3]]

    run(main())


def test_a_large_request_is_cut_and_its_answer_is_whole() -> None:
    async def main() -> None:
        model = Doubling()
        async with Batching(model, max_batch=4, batch_wait_ms=0) as batcher:
            assert await batcher.submit(list(range(10))) == [number * 2 for number in range(10)]
            assert await batcher.submit([]) == []
        assert [len(batch) for batch in model.batches] == [4, 4, 2]

    run(main())


def test_one_bad_input_does_not_fail_the_others_of_its_batch() -> None:
    async def main() -> None:
        async with Batching(Doubling(), max_batch=3, batch_wait_ms=FAR) as batcher:
            asked = (batcher.submit([1]), batcher.submit(["bad"]), batcher.submit([3]))
            found = await asyncio.gather(*asked, return_exceptions=True)
        assert (found[0], found[2]) == ([2], [6])
        assert isinstance(found[1], Refused)
        assert found[1].status == 500
        assert "TypeError" in found[1].message

    run(main())


def test_a_wrong_number_of_results_is_the_models_fault() -> None:
    class Losing:
        def predict(self, items: list[Any]) -> list[Any]:
            return items[1:]

    async def main() -> None:
        async with Batching(Losing(), batch_wait_ms=0) as batcher:
            with pytest.raises(Refused, match="0 results for 1 items"):
                await batcher.submit([1])

    run(main())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def main() -> None:
        model = Doubling()
        model.may_go.clear()
        async with Batching(model, max_batch=1, batch_wait_ms=0, queue=2) as batcher:
            waiting = [asyncio.create_task(batcher.submit([number])) for number in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Refused) as caught:
                await batcher.submit([9])
            model.may_go.set()
            assert await asyncio.gather(*waiting) == [[0], [2]]
        assert caught.value.status == 429
        assert caught.value.headers() == {"Retry-After": "1"}

    run(main())


def test_what_nobody_waits_for_is_not_computed() -> None:
    async def main() -> None:
        model = Doubling()
        model.may_go.clear()
        async with Batching(model, max_batch=1, batch_wait_ms=0) as batcher:
            first, second, third = (asyncio.create_task(batcher.submit([number])) for number in range(3))
            await asyncio.to_thread(model.began.wait, LIMIT_S)
            second.cancel()
            await asyncio.sleep(0)
            model.may_go.set()
            assert [await first, await third] == [[0], [4]]
        assert model.batches == [[0], [2]]

    run(main())
