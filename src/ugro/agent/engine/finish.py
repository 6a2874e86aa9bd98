"""The end of an attempt: every rank is dead; what it made is collected, and how it ended is recorded."""

from __future__ import annotations

import logging
from dataclasses import replace

from ugro.agent.artifacts.collector import Collector
from ugro.agent.engine.failure_facts import failure_of
from ugro.agent.engine.launch import Launch
from ugro.agent.engine.notices import RunNotices, with_notices
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.failure import Cause, Failure
from ugro.core.job import Ending, Job, JobState, Tries
from ugro.core.support import clock
from ugro.nodes.runs import RunStatus
from ugro.policy.lifecycle.retry import JobView, Retry, after_failure
from ugro.policy.wording import names
from ugro.store.job_moves import StaleMove
from ugro.store.jobs import JobStore

log = logging.getLogger(__name__)


class Finish:
    def __init__(
        self, jobs: JobStore, watch: RunTracker, collector: Collector, launch: Launch, notices: RunNotices
    ) -> None:
        self._jobs = jobs
        self._watch = watch
        self._collector = collector
        self._launch = launch
        self._notices = notices

    async def at_once(self, job: Job) -> None:
        """Of an attempt that succeeded and of which everything is here: its last moves in one transaction.

        Raises ``StaleMove`` for one that was asked to end meanwhile: that goes step by step.
        """
        point("finish.begun")
        log = self._collector.sent_logs(job)
        await self._collector.unfollow_logs(log)
        point("finish.logged")
        try:
            await self._jobs.finish(job, log)
        except StaleMove:
            await self._collector.write_log(log)
            raise
        point("finish.recorded")
        await self._collector.complete_log(job, log)
        self._launch.forget(job.id, job.attempt)

    async def conclude(self, job: Job) -> None:
        """What is left on the nodes is removed later, also logs that could not be collected yet."""
        point("conclude.begun")
        await self._collector.fetch_logs(job)
        point("conclude.logged")
        await self._record(await self._jobs.get(job.id))
        point("conclude.recorded")
        self._launch.forget(job.id, job.attempt)

    async def _record(self, job: Job) -> None:
        if job.ending is Ending.CANCELLED:
            await self._jobs.move(job, JobState.CANCELLED, self._cancelled(job), exit_code=130)
        elif job.ending is Ending.DONE or self._has_succeeded(job):
            reason = with_notices("every rank ended with 0", self._notices.of(job))
            await self._jobs.move(job, JobState.SUCCEEDED, reason, exit_code=0)
        else:
            failure = self._failure(job)
            await self._record_failure(
                job, replace(failure, reason=with_notices(failure.reason, self._notices.of(job)))
            )

    def _cancelled(self, job: Job) -> str:
        shares = job.placement.shares if job.placement else ()
        out_of_sight = [
            share.node
            for share in shares
            if (not self._watch.can_be_asked(share.node) or self._watch.is_elsewhere(share))
            and self._exit(job, share.node) is None
            and not self._launch.was_never_asked(job, share.node)
        ]
        if not out_of_sight:
            return "cancelled; every rank has ended"
        left = f"{names(out_of_sight)} cannot be asked under this name any more"
        return f"cancelled; {left}: what runs there goes on, and is ended when it is reached again"

    def _has_succeeded(self, job: Job) -> bool:
        """The reason to stop it came too late."""
        nodes = job.placement.nodes if job.placement else ()
        ends = [self._exit(job, node) for node in nodes]
        return bool(ends) and all(status is not None and status.outcome == "succeeded" for status in ends)

    async def _record_failure(self, job: Job, failure: Failure) -> None:
        self._launch.check_again(job)
        await self._collector.fetch_checkpoints(job)
        view, now = await self._view(job), clock.now()
        verdict = after_failure(view, failure, now.wall_s)
        if isinstance(verdict, Retry):
            log.info("%s", verdict.reason, extra={"job": job.id, "attempt": job.attempt})
            pause_s = verdict.not_before - now.wall_s
            tries = Tries(verdict.charged, verdict.free, verdict.not_before, verdict.avoid, pause_s, now.boot)
            await self._jobs.move(job, JobState.RECOVERING, verdict.reason, ending=None, tries=tries, failure=failure)
        else:
            code = failure.exit_code_of_job
            await self._jobs.move(job, JobState.FAILED, verdict.reason, exit_code=code, failure=failure)

    async def _view(self, job: Job) -> JobView:
        return JobView(
            job.spec.retry,
            job.tries.charged,
            job.tries.free,
            has_progressed=await self._collector.has_progressed(job),
            has_checkpoint=await self._collector.has_checkpoint(job.id),
            has_other_nodes=self._watch.count > len(job.placement.nodes if job.placement else ()),
        )

    def _failure(self, job: Job) -> Failure:
        assert job.placement is not None
        ends = [(node, self._exit(job, node)) for node in job.placement.nodes if self._was_there(job, node)]
        refusal = self._launch.refusal(job)
        has_run = any(status and status.ranks for _, status in ends)
        if refusal is not None and (not has_run or refusal.cause is Cause.GPU_UNAVAILABLE):
            return refusal  # what ran on its other nodes was stopped for it
        return failure_of(job, ends, self._watch.clock_offset_s)

    def _was_there(self, job: Job, node: str) -> bool:
        is_ruled_out = self._watch.is_ruled_out(node, job.id, job.attempt)
        return not is_ruled_out and not self._launch.was_never_asked(job, node)

    def _exit(self, job: Job, node: str) -> RunStatus | None:
        status = self._watch.status(node, job.id, job.attempt)
        return status if status is not None and status.has_ended else None
