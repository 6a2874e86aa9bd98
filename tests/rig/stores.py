"""Stores on disk, opened for a test's work and closed after it, whatever came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from ugro.store.database import Store
from ugro.telemetry.metricstore import MetricStore


class _Closable(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)


def in_store(folder: Path, work: Callable[[Store], Awaitable[None]]) -> None:
    asyncio.run(_with(Store(folder / "state.db"), work))


def in_metric_store(folder: Path, work: Callable[[MetricStore], Awaitable[None]]) -> None:
    asyncio.run(_with(MetricStore(folder / "metrics.db"), work))


async def _with(store: S, work: Callable[[S], Awaitable[None]]) -> None:
    await store.open()
    try:
        await work(store)
    finally:
        await store.close()
