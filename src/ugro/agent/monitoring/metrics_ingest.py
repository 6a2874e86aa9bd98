"""Reads metrics from the collected files of jobs while they run, and again after they have ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ugro.core.errors import UgroError
from ugro.core.job import Job
from ugro.store.ends import EndStore
from ugro.store.jobs import JobStore
from ugro.telemetry.collector import Collector

log = logging.getLogger(__name__)

_EVERY_S = 1.0
# Files may arrive after the job's end: they are read again after these times.
_AFTERWARDS_S = (0.0, 5.0, 30.0, 300.0)


class MetricsIngest:
    def __init__(
        self, collector: Collector, jobs: JobStore, ends: EndStore, holding: Callable[[], Sequence[Job]]
    ) -> None:
        self._collector = collector
        self._jobs = jobs
        self._ends = ends
        self._holding = holding
        self._place = 0
        self._told: dict[int, set[str]] = {}  # files with endless lines, of which an event says so
        self._later: dict[int, list[float]] = {}  # when to look (again) at jobs that have ended

    async def run(self) -> None:
        self._place = await self._ends.newest()
        # Including files that arrived while no agent was running.
        self._later = {job: [0.0] for job in await asyncio.to_thread(self._collector.jobs)}
        while True:
            try:
                if not self._collector.has_no_room:  # the files stay, and are read when there is some
                    await self._look()
            except UgroError as error:
                log.error("cannot read which jobs have ended: %s", error)
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        now = time.monotonic()
        while ends := await self._ends.after(self._place):
            self._place = ends[-1].seq
            self._later |= {end.job: [now + after_s for after_s in _AFTERWARDS_S] for end in ends}
        live = {job.id for job in self._holding()}
        over = {job for job, times in self._later.items() if times[0] <= now}
        for job in await self._collector.having_news(live - over, over):
            await self._ingest(job, is_over=job not in live)
        for job in over:
            self._later[job].pop(0)
            if not self._later[job]:
                del self._later[job]
                self._told.pop(job, None)

    async def _ingest(self, job: int, *, is_over: bool) -> None:
        try:
            await (self._collector.finish(job) if is_over else self._collector.collect(job))
            for name in self._collector.take_cut(job) - self._told.get(job, set()):
                self._told.setdefault(job, set()).add(name)
                text = f"{name} has a line of more than 1 MiB: it is not read as metrics"
                await self._jobs.note("metrics", text, job=await self._jobs.get(job))
        except (UgroError, OSError) as error:
            log.error("cannot read its metrics: %s", error, extra={"job": job})
