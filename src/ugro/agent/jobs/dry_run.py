"""The dry run: what a job would get if it were submitted now. Nothing is recorded, nothing is started."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from ugro.agent.tracking.scheduler_input import Snapshots
from ugro.core.job import After, Job, JobSpec, JobState, Placement
from ugro.core.plan import DryRun, Plan
from ugro.policy.scheduling.cluster_view import ClusterView
from ugro.policy.scheduling.decision import Decision, Fail, Start, Wait
from ugro.policy.scheduling.scheduler import schedule
from ugro.store.jobs import JobStore


class Previewer(Protocol):
    def preview(self, job: Job, placement: Placement) -> Plan: ...


class Previews:
    def __init__(self, jobs: JobStore, snapshots: Snapshots, previewer: Previewer) -> None:
        self._jobs = jobs
        self._snapshots = snapshots
        self._previewer = previewer

    async def dry_run(self, spec: JobSpec, user: str) -> DryRun:
        await self._snapshots.first_answers()
        newest = await self._jobs.newest(1)
        job = Job(newest[0].id + 1 if newest else 1, spec, user, JobState.QUEUED, "", _now(), attempt=1)
        waiting = await self._jobs.in_states({JobState.QUEUED, JobState.RECOVERING})
        snapshot = await self._snapshots.take([*waiting, replace(job, attempt=0)])
        decision = _decision(snapshot, job.id)
        if isinstance(decision, Start):
            return self._planned(job, decision, decision.reason, starts_now=True)
        alone = _decision(_idle(snapshot, job.id), job.id)
        if isinstance(alone, Start) and not isinstance(decision, Fail):
            return self._planned(job, alone, decision.reason, starts_now=False)
        return DryRun(spec, False, decision.reason)

    def _planned(self, job: Job, start: Start, reason: str, *, starts_now: bool) -> DryRun:
        plan = self._previewer.preview(replace(job, placement=start.placement), start.placement)
        return DryRun(job.spec, starts_now, reason, plan, start.placement)


def _decision(snapshot: ClusterView, job: int) -> Start | Fail | Wait:
    decisions: list[Decision] = schedule(snapshot)
    return next(one for one in decisions if one.job == job and isinstance(one, Start | Fail | Wait))


def _idle(snapshot: ClusterView, job: int) -> ClusterView:
    """The same nodes with nobody else there, and nothing to come after."""
    [mine] = [one for one in snapshot.waiting if one.id == job]
    return replace(snapshot, waiting=(replace(mine, spec=replace(mine.spec, after=After())),), holding=())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
