"""Items of requests that arrive together are computed together. The first one waits a few milliseconds for others."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from ugro.inference.metrics import Metrics
from ugro.inference.options import Limits
from ugro.inference.predictors import Predictor
from ugro.inference.refusals import Refused, model_failed, queue_full
from ugro.inference.threads import Worker

log = logging.getLogger(__name__)


class _Request:
    """Items of one client. Its answer is complete when each has a result."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.results: list[Any] = [None] * len(items)
        self._missing = len(items)
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def put(self, at: int, result: Any) -> None:
        self.results[at] = result
        self._missing -= 1
        if not self._missing and not self.done.done():
            self.done.set_result(self.results)

    def fail(self, error: Refused) -> None:
        if not self.done.done():
            self.done.set_exception(error)


_Item = tuple[_Request, int, Any]  # whose, the how-manieth, what


class Batcher:
    def __init__(self, predictor: Predictor, limits: Limits, metrics: Metrics) -> None:
        self.predictor, self._limits, self._metrics = predictor, limits, metrics
        self._items: deque[_Item] = deque()
        self._requests: set[_Request] = set()
        self._arrived = asyncio.Event()
        self.worker = Worker("predict")
        self._computing = 0

    async def submit(self, items: Sequence[Any]) -> list[Any]:
        """The results, in the order of the items. When the caller is cancelled, what has not begun is dropped."""
        if len(self._requests) >= self._limits.queue:
            raise queue_full(len(self._requests), 1)
        if not items:
            return []
        request = _Request(items)
        self._requests.add(request)
        self._items.extend((request, at, item) for at, item in enumerate(items))
        self._arrived.set()
        try:
            return await request.done
        finally:
            self._requests.discard(request)

    def waiting(self) -> int:
        return len(self._items)

    def running(self) -> int:
        return self._computing

    async def run(self) -> None:
        while True:
            if not self._items:
                self._arrived.clear()
                await self._arrived.wait()
            await self._gather()
            if batch := self._taken():
                await self._compute(batch)

    async def _gather(self) -> None:
        """Lets others arrive, but only while the batch is not full."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._limits.batch_wait_ms / 1000
        while len(self._items) < self._limits.max_batch and (left := end - loop.time()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _taken(self) -> list[_Item]:
        batch: list[_Item] = []
        while self._items and len(batch) < self._limits.max_batch:
            item = self._items.popleft()
            if not item[0].done.done():  # its client is gone, or another item of it has failed
                batch.append(item)
        return batch

    async def _compute(self, batch: list[_Item]) -> None:
        self._metrics.batch(len(batch))
        self._computing = len(batch)
        try:
            results = await self.worker.call(self._predict, [item for _, _, item in batch])
        finally:
            self._computing = 0
        if isinstance(results, Refused) and len(batch) > 1:
            # One of them is to blame. The others must not suffer for it.
            for one in batch:
                await self._compute([one])
            return
        for at, (request, place, _) in enumerate(batch):
            if isinstance(results, Refused):
                request.fail(results)
            else:
                request.put(place, results[at])

    def _predict(self, items: list[Any]) -> list[Any] | Refused:
        try:
            results = list(self.predictor.predict(items))
        except Refused as error:
            return error
        except Exception as error:
            log.exception("the model failed with %d items", len(items))
            return model_failed(f"{type(error).__name__}: {error}")
        if len(results) != len(items):
            return model_failed(f"predict returned {len(results)} results for {len(items)} items")
        return results
