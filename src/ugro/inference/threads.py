"""Work that blocks, in threads that do not keep the process alive: a hung model must not delay its end."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Call = Callable[[], None]


class Worker:
    """One thread for all calls: what computes with several threads keeps a pool of them for each thread that calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_settling(done, function, args))
        return await done

    def _work(self) -> None:
        while True:
            self._calls.get()()


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """In a thread of its own, which ends with it."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    name = getattr(function, "__name__", "work")
    threading.Thread(target=_settling(done, function, args), name=name, daemon=True).start()
    return await done


def _settling(done: asyncio.Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> _Call:
    loop = done.get_loop()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # nobody waits for it any more
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001  # raised again in the loop that waits for it
            failure = error
        loop.call_soon_threadsafe(settle, result, failure)

    return work
