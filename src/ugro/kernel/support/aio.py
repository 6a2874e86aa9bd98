"""Additions to asyncio: tasks that fail together, restarted tasks, threads that outlast a cancelled caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# --- requests that travel together ------------------------------------------------------------------------------------
# Requests to a node that are made at about the same time travel in one message; each gets its own result.


T = TypeVar("T")
R = TypeVar("R")

_MOST_AT_ONCE = 250


class Batcher(Generic[T, R]):
    """``send`` is given a node and what goes there: a result for each, or the error that is raised for it.

    What comes within ``gather_s`` is sent together, and at once when ``enough`` have come.
    """

    def __init__(
        self,
        send: Callable[[str, Sequence[T]], Awaitable[Sequence[R | Exception]]],
        gather_s: float = 0.0,
        enough: int = _MOST_AT_ONCE,
    ) -> None:
        self._send = send
        self._gather_s = gather_s
        self._enough = enough
        self._open: dict[str, _Batch[T, R]] = {}  # by node: those that still take requests
        self._tasks: set[asyncio.Task[Sequence[R | Exception]]] = set()

    async def request(self, node: str, item: T) -> R:
        """A caller that is cancelled gets no result; its request is sent all the same."""
        batch = self._open.get(node)
        if batch is None:
            batch = self._open[node] = _Batch()
            batch.task = asyncio.create_task(self._run(node, batch), name=f"requests to {node}")
            self._tasks.add(batch.task)
            batch.task.add_done_callback(self._note_end)
        batch.items.append(item)
        number = len(batch.items) - 1
        if len(batch.items) >= self._enough:
            self._close(node, batch)
        assert batch.task is not None
        result = (await asyncio.shield(batch.task))[number]
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, node: str, batch: _Batch[T, R]) -> Sequence[R | Exception]:
        timer = asyncio.get_running_loop().call_later(self._gather_s, self._close, node, batch)
        try:
            await batch.is_complete.wait()
        finally:
            timer.cancel()
            self._close(node, batch)
        return await self._send(node, batch.items)

    def _close(self, node: str, batch: _Batch[T, R]) -> None:
        """Later requests go into another batch."""
        if self._open.get(node) is batch:
            del self._open[node]
        batch.is_complete.set()

    def _note_end(self, task: asyncio.Task[Sequence[R | Exception]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen: every caller may have been cancelled


class _Batch(Generic[T, R]):
    def __init__(self) -> None:
        self.items: list[T] = []
        self.is_complete = asyncio.Event()
        self.task: asyncio.Task[Sequence[R | Exception]] | None = None


# --- tasks and threads ------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

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


# --- signals of a change ----------------------------------------------------------------------------------------------
# A signal does not say what has changed: a waiter looks again. Changes are counted, and a waiter passes the count it
# has seen, so a change between a look and a wait is not missed.


class ChangeSignal:
    def __init__(self) -> None:
        self.count = 0
        self.waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        self.count += 1
        waiters, self.waiters = self.waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """Waits until the count differs from ``seen``; False after ``timeout_s``."""
        return await wait_for_any({self: seen}, timeout_s)


async def wait_for_any(seen: Mapping[ChangeSignal, int], timeout_s: float | None = None) -> bool:
    """Waits until the count of one of them differs from what was seen; False after ``timeout_s``."""
    if not _has_changed(seen):
        waiter = asyncio.get_running_loop().create_future()
        for signal in seen:
            signal.waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            for signal in seen:
                signal.waiters.discard(waiter)
    return _has_changed(seen)


def _has_changed(seen: Mapping[ChangeSignal, int]) -> bool:
    return any(signal.count != count for signal, count in seen.items())


# --- background tasks by key ------------------------------------------------------------------------------------------
# A key that is already running is not started again; one that failed rests first.


Key = tuple[object, ...]
_LONGEST_REST_S = 60.0


class KeyedTasks:
    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failures: dict[Key, int] = {}  # in a row
        self._resting: dict[Key, asyncio.TimerHandle] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def do(self, key: Key, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key in self._tasks or key in self._resting:
            return
        task = asyncio.create_task(work(), name=" ".join(str(part) for part in key))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    def cancel(self, key: Key) -> None:
        """The task is done once its key is no longer in here."""
        if key in self._tasks:
            self._tasks[key].cancel()

    def cancel_all(self, *kinds: str) -> None:
        """Those whose keys begin with one of these words."""
        for key in [key for key in self._tasks if key[0] in kinds]:
            self.cancel(key)

    async def close(self) -> None:
        for timer in self._resting.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._rest(key)
        else:
            self._failures.pop(key, None)
            self._on_done()

    def _rest(self, key: Key) -> None:
        """After a bug or a full disk: the key may run again after a growing pause."""
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        pause_s = min(_LONGEST_REST_S, 2.0 ** min(failures - 1, 10))
        self._resting[key] = asyncio.get_running_loop().call_later(pause_s, self._wake_up, key)

    def _wake_up(self, key: Key) -> None:
        del self._resting[key]
        self._on_done()


# --- work that several callers want -----------------------------------------------------------------------------------
# It is done once, and cancelled when nobody waits for it any more.


K = TypeVar("K")


@dataclass(slots=True)
class _UnderWay(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SharedWork(Generic[K, T]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: dict[K, _UnderWay[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``work`` returns or raises; that of somebody else, if the same is under way."""
        one = self._under_way.get(key)
        if one is None:
            one = self._under_way[key] = _UnderWay(asyncio.create_task(work(), name=f"{self._name} {key}"))
            one.task.add_done_callback(lambda _: self._leave(key, one))
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting and not one.task.done():
                self._leave(key, one)  # the next caller does not get the one that is being cancelled
                one.task.cancel()

    async def close(self) -> None:
        tasks = [one.task for one in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, key: K, one: _UnderWay[T]) -> None:
        if self._under_way.get(key) is one:
            del self._under_way[key]
