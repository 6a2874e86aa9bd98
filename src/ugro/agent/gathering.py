"""Metrics of jobs: taken from what came home of them while they run, and once more when they have ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ugro.core.errors import UgroError
from ugro.core.job import Job
from ugro.telemetry.collector import Collector

log = logging.getLogger(__name__)

_EVERY_S = 1.0
# What a node brings home after the job's end is looked for then; seconds after it.
_AFTERWARDS_S = (0.0, 5.0, 30.0, 300.0)


class Gathering:
    def __init__(self, collector: Collector, running: Callable[[], Sequence[Job]]) -> None:
        self._collector = collector
        self._running = running
        self._live: set[int] = set()
        self._later: dict[int, list[float]] = {}  # when to look again at jobs that have ended

    async def run(self) -> None:
        self._later = {job: [0.0] for job in await asyncio.to_thread(self._collector.jobs)}
        while True:
            await self._look()
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        now = time.monotonic()
        live = {job.id for job in self._running()}
        for job in self._live - live:
            self._later[job] = [now + after_s for after_s in _AFTERWARDS_S]
        self._live = live
        for job in live:
            await self._gather(job, is_over=False)
        for job in [job for job, times in self._later.items() if times[0] <= now]:
            await self._gather(job, is_over=job not in live)
            self._later[job] = self._later[job][1:]
            if not self._later[job]:
                del self._later[job]

    async def _gather(self, job: int, *, is_over: bool) -> None:
        try:
            await (self._collector.finish(job) if is_over else self._collector.collect(job))
        except (UgroError, OSError) as error:
            log.error("its metrics cannot be taken in: %s", error, extra={"job": job})
