"""A signal that something has changed, for many waiters. It does not say what: a waiter looks again.

Changes are counted, and a waiter passes the count it has seen, so a change between a look and a wait is not missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


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

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Waits until the count differs from ``seen``; False after ``timeout_s``."""
        return await wait_for_any({self: seen}, timeout_s)


async def wait_for_any(seen: Mapping[ChangeSignal, int], timeout_s: float) -> bool:
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
