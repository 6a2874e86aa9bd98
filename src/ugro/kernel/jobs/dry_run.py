"""The dry run: where a job would start if it were submitted now. It records and starts nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ugro.features.environments.rules.naming import in_words, label_of
from ugro.features.quotas.rules import NO_ACCOUNTS
from ugro.kernel.jobs.engine.preflight import LaunchRefused
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.scheduler_input import Live, SchedulerInput, waiting_view
from ugro.kernel.jobs.model import After, Job, JobSpec, JobState, Placement
from ugro.kernel.jobs.records import DryRun, Plan
from ugro.kernel.jobs.scheduling.fit import unlimited_memory
from ugro.kernel.jobs.scheduling.model import ClusterView, Fail, Start, Wait
from ugro.kernel.jobs.scheduling.scheduler import Explanation
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import TimedOut, Unreachable, Unsatisfiable


class Previewer(Protocol):
    def preview(self, job: Job, placement: Placement) -> Plan: ...

    async def check(self, job: Job, placement: Placement) -> object:
        """Raises LaunchRefused as a launch does."""


class DryRunner:
    def __init__(self, jobs: JobStore, live: Live, scheduler_input: SchedulerInput, previewer: Previewer) -> None:
        self._jobs = jobs
        self._live = live
        self._scheduler_input = scheduler_input
        self._previewer = previewer

    async def dry_run(self, spec: JobSpec, user: str) -> DryRun:
        await self._scheduler_input.first_answers()
        newest = await self._jobs.newest(1)
        number, now = newest[0].id + 1 if newest else 1, clock.now()
        job = Job(number, spec, user, JobState.QUEUED, "", now.at, attempt=1, submitted_boot=now.boot)
        after = await self._jobs.states_of((*spec.after.ok, *spec.after.any))
        view = await self._scheduler_input.take(self._live)
        waiting = (*self._live.queue, waiting_view(replace(job, attempt=0), self._scheduler_input.clock.reading()))
        view = replace(view, waiting=waiting, ended={**self._live.queue.outcomes, **after})
        decision = _decision(view, job.id)
        if isinstance(decision, Start):
            return await self._planned(job, decision, decision.reason, starts_now=True)
        alone = _decision(_idle(view, job.id), job.id)
        if isinstance(alone, Start) and not isinstance(decision, Fail):
            return await self._planned(job, alone, decision.reason, starts_now=False)
        return DryRun(spec, False, decision.reason)

    async def place_idle(self, spec: JobSpec) -> Placement:
        """What the job would get if no other held anything, whatever its user may have; raises Unsatisfiable."""
        await self._scheduler_input.first_answers()
        job = Job(1, spec, "", JobState.QUEUED, "", clock.now().at)
        view = await self._scheduler_input.take(self._live)
        waiting = (waiting_view(job, self._scheduler_input.clock.reading()),)
        decision = _decision(_idle(replace(view, waiting=waiting, accounts=NO_ACCOUNTS), job.id), job.id)
        if isinstance(decision, Start):
            return decision.placement
        raise Unsatisfiable(decision.reason, hint="see: ugro health")

    async def _planned(self, job: Job, start: Start, reason: str, *, starts_now: bool) -> DryRun:
        job = replace(job, placement=start.placement)
        notes = [unlimited_memory(start.placement, self._scheduler_input.limits())]
        if (refused := await self._refusal(job, start.placement)) is not None:
            text = refused.message.removeprefix("not started: ")
            if starts_now:
                raise Unsatisfiable(f"{job.spec.name} would not start: {text}", hint=refused.hint)
            notes.append(f"on these nodes it would not start: {text}")
        plan = self._previewer.preview(job, start.placement)
        note = "; ".join(filter(None, notes)) or None
        environment = self._environment(job.spec, start.placement)
        return DryRun(job.spec, starts_now, reason, plan, start.placement, note=note, environment=environment)

    async def _refusal(self, job: Job, placement: Placement) -> LaunchRefused | None:
        """Why a launch on these nodes would be refused. Of one that cannot be reached now, nothing is said."""
        if job.spec.setup is not None:
            return None  # it may install what is missing
        try:
            await self._previewer.check(job, placement)
        except LaunchRefused as error:
            return error
        except (Unreachable, TimedOut):
            return None
        return None

    def _environment(self, spec: JobSpec, placement: Placement) -> str | None:
        if spec.environment is None:
            return None
        labels = {node: label_of(spec.environment, self._scheduler_input.labels(node)) for node in placement.nodes}
        others = [f"{node} gets the override for {label}" for node, label in labels.items() if label]
        return "; ".join([in_words(spec.environment), *others])


def _decision(view: ClusterView, job: int) -> Start | Fail | Wait:
    decision = Explanation(view).of(job)
    assert decision is not None, "it is one of the waiting jobs"
    return decision


def _idle(view: ClusterView, job: int) -> ClusterView:
    """The same nodes without other jobs, and no jobs to run after."""
    [mine] = [one for one in view.waiting if one.id == job]
    return replace(view, waiting=(replace(mine, spec=replace(mine.spec, after=After())),), holding=())


# --- why queued jobs wait ---------------------------------------------------------------------------------------------


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
