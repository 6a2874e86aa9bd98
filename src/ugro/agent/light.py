"""Small commands, many at once: one call to a node starts, and one removes, what has come together; one commit ends it.

A command is small when it needs nothing but a place to run: one process, no GPU, no lease, nothing to set up. It takes
the same steps as any other job. Whatever does not go well is left to the way that all jobs go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from ugro.agent.crashpoint import point
from ugro.agent.homecoming import Homecoming
from ugro.agent.leases import lease_s
from ugro.agent.runwatch import RunWatch
from ugro.agent.starting import Starting
from ugro.agent.work import Work
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import Job, Launcher
from ugro.store.jobs import JobStore, StaleMove

log = logging.getLogger(__name__)

Batch = Callable[[Sequence[Job]], Coroutine[Any, Any, None]]

_MOST_AT_ONCE = 250
# Most are over by then, and their log comes with the news of it: nobody has to ask.
PATIENCE_S = 0.2
_REST_S = 0.5
_IS_SERVED = False  # TEMPORARY


def is_light(job: Job) -> bool:
    spec = job.spec
    if spec.launcher is not Launcher.COMMAND or spec.setup or spec.has_checkpoints or not _IS_SERVED:
        return False
    return lease_s(job) is None and job.placement is not None and not job.placement.shares[0].gpus


class Light:
    def __init__(self, jobs: JobStore, watch: RunWatch, starting: Starting, home: Homecoming, work: Work) -> None:
        self._jobs = jobs
        self._watch = watch
        self._starting = starting
        self._home = home
        self._work = work
        self._busy: set[tuple[int, int]] = set()
        self._starts: dict[str, list[Job]] = {}
        self._ends: dict[str, list[Job]] = {}
        self._since: dict[tuple[int, int], float] = {}
        self._resting: dict[tuple[int, int], float] = {}  # until when it is not asked for again
        self._batches = 0

    def start(self, job: Job, node: str) -> None:
        if self._resting.get((job.id, job.attempt), 0.0) <= time.monotonic():
            self._note(self._starts, job, node)

    def finish(self, job: Job) -> bool:
        """Every rank has ended with 0. False when its log has to be fetched first."""
        (node,) = job.placement.nodes if job.placement else ()
        status = self._watch.status(node, job.id, job.attempt)
        if (job.id, job.attempt) not in self._busy:
            if status is None or status.logs is None or self._home.is_following(status):
                return False
            self._note(self._ends, job, node)
        return True

    def may_follow(self, job: Job) -> bool:
        """Whether it has been running for so long that somebody may want to see what it writes."""
        since = self._since.setdefault((job.id, job.attempt), time.monotonic())
        return time.monotonic() - since >= PATIENCE_S

    def flush(self) -> bool:
        """Begins what was noted in this pass; True when some may be followed soon."""
        starts, self._starts = self._starts, {}
        ends, self._ends = self._ends, {}
        for node, jobs in starts.items():
            self._begin(jobs, partial(self._start_many, node))
        for node, jobs in ends.items():
            self._begin(jobs, partial(self._finish_many, node))
        now = time.monotonic()
        return any(now - since < PATIENCE_S for since in self._since.values())

    def forget(self, under_way: set[tuple[int, int]]) -> None:
        self._since = {key: since for key, since in self._since.items() if key in under_way}
        self._resting = {key: until for key, until in self._resting.items() if key in under_way}

    def _note(self, noted: dict[str, list[Job]], job: Job, node: str) -> None:
        key = (job.id, job.attempt)
        if key not in self._busy:
            self._busy.add(key)
            noted.setdefault(node, []).append(job)

    def _begin(self, jobs: Sequence[Job], work: Batch) -> None:
        for first in range(0, len(jobs), _MOST_AT_ONCE):
            part = jobs[first : first + _MOST_AT_ONCE]
            self._batches += 1
            self._work.do(("batch", self._batches), partial(self._do, part, work))

    async def _do(self, jobs: Sequence[Job], work: Batch) -> None:
        try:
            await work(jobs)
        finally:
            self._busy -= {(job.id, job.attempt) for job in jobs}

    async def _start_many(self, node: str, jobs: Sequence[Job]) -> None:
        for job in await self._starting.start_many(jobs, node):
            self._resting[job.id, job.attempt] = time.monotonic() + _REST_S

    async def _finish_many(self, node: str, jobs: Sequence[Job]) -> None:
        told = [self._watch.status(node, job.id, job.attempt) for job in jobs]
        point("conclude.begun")
        await self._home.keep_logs(node, [status for status in told if status is not None])
        point("conclude.logged")
        ended = await asyncio.gather(*(self._finish(job) for job in jobs))
        point("conclude.recorded")
        gone = [(job.id, job.attempt) for job in ended if job is not None]
        for job, attempt in gone:
            self._starting.forget(job, attempt)
        await self._remove(node, gone)

    async def _finish(self, job: Job) -> Job | None:
        try:
            return await self._jobs.finish(job)
        except StaleMove:  # it was told to end meanwhile: that goes the usual way
            return None

    async def _remove(self, node: str, runs: Sequence[tuple[int, int]]) -> None:
        try:
            results = await self._watch.runs(node).remove_many(runs)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.info("the sweep will remove what stays: %s", error, extra={"node": node})
            return
        for (job, attempt), failure in zip(runs, results, strict=True):
            if failure is None:
                self._watch.forget_on(node, job, attempt)
                self._home.forget_logs(node, job, attempt)
