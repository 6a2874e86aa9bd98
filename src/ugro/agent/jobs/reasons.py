"""Why queued jobs wait, for all who look at them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ugro.agent.engine.reconciler import Engine
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.core.job import Job, JobState
from ugro.policy.scheduling.cluster_view import ClusterView
from ugro.policy.scheduling.decision import Start, Wait
from ugro.policy.scheduling.scheduler import Explanation

_OLDEST_S = 2.0  # that reasons may be


class Reasons:
    """What queued jobs wait for, from a pass of the scheduler that many requests share."""

    def __init__(self, engine: Engine, scheduler_input: SchedulerInput) -> None:
        self._engine = engine
        self._scheduler_input = scheduler_input
        self._explanation = Explanation(ClusterView(0.0))
        self._until = float("-inf")

    async def added_to(self, jobs: Sequence[Job]) -> list[Job]:
        """Adds reasons to queued jobs. Between attempts the reason stays: it says how the last one ended."""
        if not any(job.state is JobState.QUEUED for job in jobs):
            return list(jobs)
        if self._engine.safe_mode.is_on:
            waits = "the agent is in safe mode: it starts nothing"
            return [replace(job, reason=waits) if job.state is JobState.QUEUED else job for job in jobs]
        await self._refresh()
        return [replace(job, reason=self._of(job)) for job in jobs]

    def _of(self, job: Job) -> str:
        found = self._explanation.of(job.id) if job.state is JobState.QUEUED else None
        if isinstance(found, Start) and (waits := self._engine.first_answers.reason(job.id)) is not None:
            return waits
        return found.reason if isinstance(found, Wait) else job.reason

    async def _refresh(self) -> None:
        if time.monotonic() < self._until:
            return
        self._until = time.monotonic() + _OLDEST_S
        live = self._engine.live
        await live.read()
        self._explanation = Explanation(await self._scheduler_input.take(live), live.queue)
