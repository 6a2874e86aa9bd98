"""The jobs that are not over, as the database has them: read once, and then told of every change.

The agent alone writes, so this is never behind. What it would miss by a bug of ours, it reads again before long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ugro.core.job import FINAL_STATES, HOLDING_STATES, Job, JobState
from ugro.store.jobs import JobStore

_LIVE = frozenset(JobState) - FINAL_STATES
_READ_AGAIN_S = 30.0


class LiveJobs:
    def __init__(self, jobs: JobStore, on_change: Callable[[], None]) -> None:
        self._jobs = jobs
        self._on_change = on_change
        self._known: dict[int, Job] = {}
        self._read_at = float("-inf")
        jobs.listen(self._note)

    async def read(self) -> None:
        if time.monotonic() - self._read_at >= _READ_AGAIN_S:
            await self._jobs.read_states(_LIVE, self._replace)
            self._read_at = time.monotonic()

    @property
    def count(self) -> int:
        return len(self._known)

    def holding(self) -> list[Job]:
        return [job for job in self._known.values() if job.state in HOLDING_STATES]

    def waiting(self) -> list[Job]:
        """The oldest first."""
        return sorted((job for job in self._known.values() if job.state not in HOLDING_STATES), key=lambda job: job.id)

    def _replace(self, jobs: list[Job]) -> None:
        self._known = {job.id: job for job in jobs}

    def _note(self, job: Job) -> None:
        if job.is_final:
            self._known.pop(job.id, None)
        else:
            self._known[job.id] = job
        self._on_change()
