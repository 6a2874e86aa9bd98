"""How many submissions the store takes in a second: a SQLite file, and PostgreSQL on the same machine, in turn.

    python -m bench store

Every submission is durable before it is acknowledged, in both. There is no bar: neither is meant to beat the other.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.rig import postgres
from tests.rig.postgres import PostgresServer

from bench.bars import Bar, Row, print_rows
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.store.address import postgres_at
from ugro.kernel.store.database import Store

_TOGETHER = 1500
_ALONE = 300
_SPEC = JobSpec("train", ("python", "train.py"))


def measure(rounds: int) -> list[Bar]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ugro-bench-")))
        engines: dict[str, Callable[[Path], Store]] = {"SQLite": Store}
        if (missing := postgres.missing()) is None:
            server = PostgresServer(settings=())  # as PostgreSQL comes: what it has acknowledged is on disk
            stack.callback(server.stop)
            engines["PostgreSQL"] = lambda path: Store(postgres_at(server.address_of(path)))
        else:
            print(f"PostgreSQL: {missing}\n")
        together, alone = ({name: Row(name) for name in engines} for _ in range(2))
        for number in range(rounds):
            for name, make in engines.items():
                path = folder / f"{name}-{number}.db"
                together_s, alone_s = asyncio.run(_submissions(make(path)))
                together[name].seconds.append(together_s)
                alone[name].seconds.append(alone_s)
    _print(f"{_TOGETHER:,} submissions that arrive together", together, _TOGETHER)
    _print(f"{_ALONE:,} submissions, one after the other", alone, _ALONE)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    return []


async def _submissions(store: Store) -> tuple[float, float]:
    """Seconds of those that arrive together, and of those that follow each other."""
    await store.open()
    try:
        began = time.perf_counter()
        await asyncio.gather(*(store.jobs.submit(_SPEC, "ann", f"together {one}") for one in range(_TOGETHER)))
        between = time.perf_counter()
        for one in range(_ALONE):
            await store.jobs.submit(_SPEC, "ann", f"alone {one}")
        return between - began, time.perf_counter() - between
    finally:
        await store.close()


def _print(title: str, rows: dict[str, Row], count: int) -> None:
    for row in rows.values():
        slowest, fastest = count / max(row.seconds), count / row.min_s
        row.remark = f"{slowest:,.0f} to {fastest:,.0f} a second, median {count / row.median_s:,.0f}"
    print_rows(title, rows.values())
