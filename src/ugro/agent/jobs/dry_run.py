"""The dry run: where a job would start if it were submitted now. It records and starts nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from ugro.agent.tracking.scheduler_input import Live, SchedulerInput, waiting_view
from ugro.core.job import After, Job, JobSpec, JobState, Placement
from ugro.core.plan import DryRun, Plan
from ugro.policy.scheduling.cluster_view import ClusterView
from ugro.policy.scheduling.decision import Fail, Start, Wait
from ugro.policy.scheduling.scheduler import Explanation
from ugro.store.jobs import JobStore


class Previewer(Protocol):
    def preview(self, job: Job, placement: Placement) -> Plan: ...


class DryRunner:
    def __init__(self, jobs: JobStore, live: Live, scheduler_input: SchedulerInput, previewer: Previewer) -> None:
        self._jobs = jobs
        self._live = live
        self._scheduler_input = scheduler_input
        self._previewer = previewer

    async def dry_run(self, spec: JobSpec, user: str) -> DryRun:
        await self._scheduler_input.first_answers()
        newest = await self._jobs.newest(1)
        job = Job(newest[0].id + 1 if newest else 1, spec, user, JobState.QUEUED, "", _now(), attempt=1)
        after = await self._jobs.states_of((*spec.after.ok, *spec.after.any))
        view = await self._scheduler_input.take(self._live)
        waiting = (*self._live.queue, waiting_view(replace(job, attempt=0)))
        view = replace(view, waiting=waiting, ended={**self._live.queue.outcomes, **after})
        decision = _decision(view, job.id)
        if isinstance(decision, Start):
            return self._planned(job, decision, decision.reason, starts_now=True)
        alone = _decision(_idle(view, job.id), job.id)
        if isinstance(alone, Start) and not isinstance(decision, Fail):
            return self._planned(job, alone, decision.reason, starts_now=False)
        return DryRun(spec, False, decision.reason)

    def _planned(self, job: Job, start: Start, reason: str, *, starts_now: bool) -> DryRun:
        plan = self._previewer.preview(replace(job, placement=start.placement), start.placement)
        return DryRun(job.spec, starts_now, reason, plan, start.placement)


def _decision(view: ClusterView, job: int) -> Start | Fail | Wait:
    decision = Explanation(view).of(job)
    assert decision is not None, "it is one of the waiting jobs"
    return decision


def _idle(view: ClusterView, job: int) -> ClusterView:
    """The same nodes without other jobs, and no jobs to run after."""
    [mine] = [one for one in view.waiting if one.id == job]
    return replace(view, waiting=(replace(mine, spec=replace(mine.spec, after=After())),), holding=())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
