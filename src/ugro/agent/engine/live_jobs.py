"""The jobs that are not over, as the database has them: read once, and then told of every change.

The agent alone writes, so this is never behind. What it would miss by a bug of ours, it reads again before long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

from ugro.core.job import FINAL_STATES, HOLDING_STATES, Job, JobState
from ugro.store.jobs import JobStore

_LIVE = frozenset(JobState) - FINAL_STATES
_READ_AGAIN_S = 30.0


class LiveJobs:
    def __init__(self, jobs: JobStore, on_change: Callable[[], None]) -> None:
        self._jobs = jobs
        self._on_change = on_change
        # Apart: those that hold devices are few, however long the queue is, and they are asked for most often.
        self._holding: dict[int, Job] = {}
        self._waiting: dict[int, Job] = {}
        self._read_at = float("-inf")
        jobs.listen(self._note)

    async def read(self) -> None:
        if time.monotonic() - self._read_at >= _READ_AGAIN_S:
            await self._jobs.read_states(_LIVE, self._replace)
            self._read_at = time.monotonic()

    @property
    def count(self) -> int:
        return len(self._holding) + len(self._waiting)

    def holding(self) -> list[Job]:
        return list(self._holding.values())

    def waiting(self) -> list[Job]:
        """The oldest first."""
        return sorted(self._waiting.values(), key=attrgetter("id"))

    def get(self, number: int) -> Job | None:
        return self._holding.get(number) or self._waiting.get(number)

    def is_under_way(self, job: Job) -> bool:
        """Whether it holds devices, in the same attempt."""
        known = self._holding.get(job.id)
        return known is not None and known.attempt == job.attempt

    def _replace(self, jobs: list[Job]) -> None:
        self._holding = {job.id: job for job in jobs if job.state in HOLDING_STATES}
        self._waiting = {job.id: job for job in jobs if job.state not in HOLDING_STATES}

    def _note(self, job: Job) -> None:
        is_holding = job.state in HOLDING_STATES
        for jobs, belongs in ((self._holding, is_holding), (self._waiting, not is_holding and not job.is_final)):
            if belongs:
                jobs[job.id] = job
            else:
                jobs.pop(job.id, None)
        self._on_change()
