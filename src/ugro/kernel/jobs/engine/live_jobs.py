"""The jobs that have not ended, in memory: read once, then kept up to date by the store's change notifications.

The agent alone writes, so this is never behind. Should a bug of ours make it miss a change, a comparison with the
database finds it before long.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from operator import attrgetter

from ugro.kernel.jobs.engine.scheduler_input import waiting_view
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Job, JobState
from ugro.kernel.jobs.scheduling.queue import WaitingJobs
from ugro.kernel.jobs.store import JobStore, Mark
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.moments import Reading

log = logging.getLogger(__name__)

_LIVE = frozenset(JobState) - FINAL_STATES
_COMPARE_S = 30.0


class LiveJobs:
    def __init__(
        self, jobs: JobStore, reading: Callable[[], Reading], compare_s: float = _COMPARE_S
    ) -> None:
        self.changed = ChangeSignal()  # some job has moved
        self._jobs = jobs
        self._reading = reading
        self._compare_s = compare_s
        # Apart: those that hold devices are few, however long the queue is, and they are asked for most often.
        self._holding: dict[int, Job] = {}
        self._waiting: dict[int, Job] = {}
        self._cancelled: dict[int, Job] = {}  # of those that wait
        self.queue = WaitingJobs()  # the others that wait, as the scheduler sees them
        self.released = 0  # how often a job gave its devices back
        self._read_at = float("-inf")
        self._missed: list[int] = []
        jobs.listen(self._note)

    async def read(self) -> None:
        if time.monotonic() - self._read_at < self._compare_s:
            return
        if self._read_at == float("-inf"):
            await self._jobs.read_states(_LIVE, self._replace)
        else:
            await self._jobs.read_marks(_LIVE, self._compare)
            await self._jobs.read_jobs(self._missed, self._replace_some)
        self._read_at = time.monotonic()

    @property
    def count(self) -> int:
        return len(self._holding) + len(self._waiting)

    def holding(self) -> list[Job]:
        return list(self._holding.values())

    def on(self, node: str) -> list[Job]:
        """Those that hold something of this node."""
        return [job for job in self._holding.values() if job.placement is not None and node in job.placement.node_names]

    def has_jobs_on(self, node: str) -> bool:
        return bool(self.on(node))

    def waiting(self) -> list[Job]:
        """The oldest first."""
        return sorted(self._waiting.values(), key=attrgetter("id"))

    def states(self) -> Counter[JobState]:
        """How many are in each state."""
        return Counter(job.state for jobs in (self._holding, self._waiting) for job in jobs.values())

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def cancelled(self) -> list[Job]:
        """Those that wait and are to end."""
        return list(self._cancelled.values())

    def get(self, number: int) -> Job | None:
        return self._holding.get(number) or self._waiting.get(number)

    def is_under_way(self, job: Job) -> bool:
        """Whether it holds devices, in the same attempt."""
        known = self._holding.get(job.id)
        return known is not None and known.attempt == job.attempt

    def clock_was_set(self) -> None:
        """What was computed with the wall clock is computed again."""
        self._replace(list(self._waiting.values()))

    def _replace(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._take(job)

    def _compare(self, marks: dict[int, Mark]) -> None:
        known = {job.id: (job.state, job.attempt, job.ending) for job in (*self.holding(), *self._waiting.values())}
        self._missed = [number for number in known.keys() | marks.keys() if known.get(number) != marks.get(number)]

    def _replace_some(self, jobs: list[Job]) -> None:
        for number in self._missed:
            log.error("its change was missed; it is read again", extra={"job": number})
            self.released += 1
            self._forget(number)
        self._replace(jobs)
        self._missed = []

    def _note(self, job: Job) -> None:
        self._take(job)
        self.changed.notify()

    def _take(self, job: Job) -> None:
        self.released += job.id in self._holding and job.state not in HOLDING_STATES
        if job.state in HOLDING_STATES:
            self._forget(job.id)
            self._holding[job.id] = job
        elif job.is_final:
            self._forget(job.id)
            self.queue.learn(job.id, job.state)
        else:
            self._take_waiting(job)

    def _take_waiting(self, job: Job) -> None:
        self._holding.pop(job.id, None)
        self._waiting[job.id] = job
        if job.ending is None:
            self.queue.put(waiting_view(job, self._reading()))
        else:
            self._cancelled[job.id] = job
            self.queue.discard(job.id)

    def _forget(self, number: int) -> None:
        for jobs in (self._holding, self._waiting, self._cancelled):
            jobs.pop(number, None)
        self.queue.discard(number)
