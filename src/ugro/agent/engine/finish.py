"""The end of an attempt: every rank is dead; what it made comes home, its story is written down."""

from __future__ import annotations

import logging
import time

from ugro.agent.artifacts.collector import Collector
from ugro.agent.engine.failure_facts import failure_of
from ugro.agent.engine.start import Starting
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.failure import Failure
from ugro.core.job import Ending, Job, JobState, Tries
from ugro.nodes.runs import RunStatus
from ugro.policy.lifecycle.retry import JobView, Retry, after_failure
from ugro.store.jobs import JobStore

log = logging.getLogger(__name__)


class Conclusion:
    def __init__(self, jobs: JobStore, watch: RunWatch, home: Collector, starting: Starting) -> None:
        self._jobs = jobs
        self._watch = watch
        self._home = home
        self._starting = starting

    async def conclude(self, job: Job) -> None:
        """What stays behind on the nodes, the sweep finds and removes: logs that could not come home yet, too."""
        point("conclude.begun")
        await self._home.bring_logs(job)
        point("conclude.logged")
        await self._write_down(await self._jobs.get(job.id))
        point("conclude.recorded")
        self._starting.forget(job.id, job.attempt)

    async def _write_down(self, job: Job) -> None:
        if job.ending is Ending.CANCELLED:
            await self._jobs.move(job, JobState.CANCELLED, "cancelled; every rank has ended", exit_code=130)
        elif job.ending is Ending.DONE or self._has_succeeded(job):
            await self._jobs.move(job, JobState.SUCCEEDED, "every rank ended with 0", exit_code=0)
        else:
            await self._write_down_failure(job, self._failure(job))

    def _has_succeeded(self, job: Job) -> bool:
        """Whatever it was to be stopped for came too late."""
        nodes = job.placement.nodes if job.placement else ()
        told = [self._last_word(job, node) for node in nodes]
        return bool(told) and all(status is not None and status.outcome == "succeeded" for status in told)

    async def _write_down_failure(self, job: Job, failure: Failure) -> None:
        self._starting.distrust(job)
        await self._home.bring_checkpoints(job)
        verdict = after_failure(await self._view(job), failure, time.time())
        if isinstance(verdict, Retry):
            log.info("%s", verdict.reason, extra={"job": job.id, "attempt": job.attempt})
            tries = Tries(verdict.charged, verdict.free, verdict.not_before, verdict.avoid)
            await self._jobs.move(job, JobState.RECOVERING, verdict.reason, ending=None, tries=tries, failure=failure)
        else:
            code = failure.exit_code or 1
            await self._jobs.move(job, JobState.FAILED, verdict.reason, exit_code=code, failure=failure)

    async def _view(self, job: Job) -> JobView:
        return JobView(
            job.spec.retry,
            job.tries.charged,
            job.tries.free,
            has_progressed=await self._home.has_progressed(job),
            has_checkpoint=await self._home.has_checkpoint(job.id),
        )

    def _failure(self, job: Job) -> Failure:
        assert job.placement is not None
        told = [(node, self._last_word(job, node)) for node in job.placement.nodes if self._was_there(job, node)]
        refusal = self._starting.refusal(job)
        if refusal is not None and not any(status and status.ranks for _, status in told):
            return refusal
        return failure_of(job, told, self._watch.clock_offset_s)

    def _was_there(self, job: Job, node: str) -> bool:
        is_ruled_out = self._watch.is_ruled_out(node, job.id, job.attempt)
        return not is_ruled_out and not self._starting.was_never_asked(job, node)

    def _last_word(self, job: Job, node: str) -> RunStatus | None:
        status = self._watch.status(node, job.id, job.attempt)
        return status if status is not None and status.has_ended else None
