"""The end of an attempt: every rank is dead; what it made is collected, and how it ended is recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from ugro.kernel.access.model import node_of
from ugro.kernel.files.results.collector import Collector
from ugro.kernel.files.results.file_store import DiskFull
from ugro.kernel.jobs.engine.launch import Launch
from ugro.kernel.jobs.engine.rules.postmortem import Lost, RankEnd, classify, disk_hint
from ugro.kernel.jobs.engine.rules.retry import JobView, Retry, after_failure
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import RunStatus
from ugro.kernel.jobs.model import HOLDING_STATES, Cause, Ending, Failure, Job, JobState, RankExit, Tries
from ugro.kernel.jobs.moves import StaleMove
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import Batcher
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.kernel.support.process import point
from ugro.kernel.support.quantities import names

# --- the facts of a failure -------------------------------------------------------------------------------------------
# Reads how an attempt went from what its nodes recorded; ``rules.postmortem`` judges it.


_STOPPED_FOR = {
    Ending.TIME_LIMIT: Cause.TIME_LIMIT,
    Ending.PREEMPTED: Cause.PREEMPTED,
    Ending.OWNER: Cause.PREEMPTED,
}
_LOST = frozenset({"lost", "lease-expired", "interrupted"})


def failure_of(job: Job, statuses: Sequence[tuple[str, RunStatus | None]], offset_s: Callable[[str], float]) -> Failure:
    """``statuses``: each node and its exit status; None for one whose part is over without any."""
    return replace(_judged(job, statuses, offset_s), exits=exits_of(status for _, status in statuses))


def exits_of(statuses: Iterable[RunStatus | None]) -> tuple[RankExit, ...]:
    records = [rank for status in statuses if status is not None for rank in status.ranks]
    return tuple(RankExit(one.rank, one.code, one.signal) for one in sorted(records, key=lambda one: one.rank))


def _judged(job: Job, statuses: Iterable[tuple[str, RunStatus | None]], offset_s: Callable[[str], float]) -> Failure:
    ends: list[RankEnd] = []
    lost: list[Lost] = []
    for node, status in statuses:
        if status is None:
            lost.append(Lost(node, Cause.NODE_LOST))
        elif status.outcome == "start-failed":
            return _not_started(node, status)
        elif status.outcome in _LOST:
            lost.append(Lost(node, _cause_of_loss(status), status.may_have_left))
        elif status.outcome != "never-started":
            ends += _rank_ends(node, status, offset_s(node))
    stopped_for = _STOPPED_FOR.get(job.ending) if job.ending else None
    has_culprit = bool(lost) or any(end.has_failed and not end.was_stopped_by_us for end in ends)
    if stopped_for is None and not has_culprit:
        return Failure(Cause.START_FAILED, job.reason)
    if job.ending is Ending.OWNER:
        return Failure(Cause.PREEMPTED, job.reason)  # which says whose
    return classify(ends, lost=lost, stopped_for=stopped_for)


def _cause_of_loss(status: RunStatus) -> Cause:
    if status.was_rebooted:
        return Cause.NODE_REBOOTED
    return Cause.NODE_LOST if status.outcome == "lease-expired" else Cause.SUPERVISOR_LOST


def _not_started(node: str, status: RunStatus) -> Failure:
    reason = f"{node_of(node)}: {status.reason}"
    if status.is_disk_full:
        return Failure(Cause.DISK_FULL, reason, status.failed_rank, node, hint=disk_hint(node))
    if not status.is_programs_fault:
        return Failure(Cause.START_FAILED, reason, status.failed_rank, node)
    code = next((rank.code for rank in status.ranks if rank.rank == status.failed_rank), None)
    hint = "is it there on the node, and may it be executed? See: ugro exec"
    return Failure(Cause.RANK_FAILED, reason, status.failed_rank, node, code or 127, hint=hint)


def _rank_ends(node: str, status: RunStatus, offset_s: float) -> list[RankEnd]:
    return [
        RankEnd(
            rank=rank.rank,
            node=node,
            exit_code=rank.code,
            signal=rank.signal,
            ended_unix_s=rank.ended_at or 0.0,
            clock_offset_s=offset_s,
            last_lines=status.tail if rank.rank == status.failed_rank else (),
            was_oom_killed=rank.is_oom,
            reached_bytes=rank.reached_bytes,
            was_stopped_by_us=status.outcome == "stopped" and not rank.was_lost,
            was_disk_full=status.is_disk_full and rank.rank == status.failed_rank,
        )
        for rank in status.ranks
    ]


# --- notices of ranks and supervisors ---------------------------------------------------------------------------------
# They say what is to be known of an attempt besides its state, and become its events.


EVENT = "notice"
_MOST = 4
_GOING_ON = frozenset({JobState.RUNNING, JobState.UNREACHABLE})


class RunNotices:
    def __init__(self, jobs: JobStore, watch: RunTracker) -> None:
        self._jobs = jobs
        self._watch = watch
        self._told: dict[tuple[int, int], int] = {}  # how many the event log has of an attempt

    def of(self, job: Job) -> tuple[str, ...]:
        """Several ranks may say the same."""
        nodes = job.placement.nodes if job.placement else ()
        known = [self._watch.status(node, job.id, job.attempt) for node in nodes]
        return tuple(dict.fromkeys(text for one in known if one is not None for text in one.notices))[:_MOST]

    def news(self, job: Job) -> Awaitable[None] | None:
        """The event to record, if there is a new one. That a text changes, such as a count in it, is no event."""
        found, key = self.of(job), (job.id, job.attempt)
        if job.state not in _GOING_ON or len(found) <= self._told.get(key, 0):
            return None
        self._told[key] = len(found)
        return self._note(job, found)

    def forget_all_but(self, under_way: set[tuple[int, int]]) -> None:
        self._told = {key: count for key, count in self._told.items() if key in under_way}

    async def _note(self, job: Job, found: tuple[str, ...]) -> None:
        """An agent before us may have told some."""
        events = await self._jobs.events(job=job.id, limit=100_000)
        told = [one for one in events if one.kind == EVENT and one.attempt == job.attempt]
        for text in found[len(told) :]:
            await self._jobs.note(EVENT, text, job=job)


def with_notices(text: str, notices: tuple[str, ...]) -> str:
    return "; ".join([text, *notices])


# --- ending an attempt ------------------------------------------------------------------------------------------------


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


# --- runs that belong to no attempt -----------------------------------------------------------------------------------
# Runs of no attempt under way are ended, their logs and outputs collected, and then they are removed. So the run
# directory of a job that is over goes only after all of it was acknowledged, and the ranks of an attempt that was given
# up while its node was away end as soon as the node is back. Of a job that was removed nothing is collected.


# A node makes folders of runs that were removed into folders of the next ones: soon enough, and many at a time.
_GATHER_S = 0.5
_ENOUGH = 32

_GRACE_S = 5.0
_LOGS_S = 60.0
_AGAIN_S = 5.0


class OrphanRuns:
    def __init__(self, jobs: JobStore, watch: RunTracker, collector: Collector) -> None:
        self._jobs = jobs
        self._watch = watch
        self._collector = collector
        self._complaints: dict[tuple[str, int, int], str] = {}  # why a run could not be cleared when it was last tried
        self._removals: Batcher[tuple[int, int], None] = Batcher(self._send_removals, _GATHER_S, _ENOUGH)

    async def clear(self, node: str, status: RunStatus) -> None:
        try:
            if self._collector.has_logs_of(node, status) and not status.has_outputs:
                await self._remove(node, int(status.job), status.attempt)
                return
            job = await self._job(status)
            if job is None:
                await self._ended(node, status)
                await self._remove(node, int(status.job), status.attempt)
            elif not (job.state in HOLDING_STATES and job.attempt == status.attempt):
                point("sweep.found")
                await self._clear(node, status)
        except (Unreachable, TimedOut, RemoteFailure, NotFound, DiskFull) as error:
            self._complain(node, status, str(error))
            await asyncio.sleep(_AGAIN_S)

    def _complain(self, node: str, status: RunStatus, text: str) -> None:
        """Each once: it is tried again and again."""
        key = (node, int(status.job), status.attempt)
        if self._complaints.get(key) != text:
            self._complaints[key] = text
            log.warning("a run is left there for now: %s", text, extra={"node": node, "job": status.job})

    async def _job(self, status: RunStatus) -> Job | None:
        """Asked again: it may have been started since the list was made by which it is none of ours."""
        try:
            return await self._jobs.get(int(status.job))
        except NotFound:
            return None

    async def _ended(self, node: str, status: RunStatus) -> RunStatus:
        """Its status, as far as the node is believed, when no process of it is left."""
        if status.has_ended:
            return status
        job, attempt = int(status.job), status.attempt
        log.info("ending a run that is over", extra={"node": node, "job": job, "attempt": attempt})
        answer = await self._watch.runs(node).stop(job, attempt, "this attempt is over", _GRACE_S)
        believed = self._watch.learn(node, answer)
        point("sweep.stopped")
        if believed is None:  # the link was lost meanwhile: the node says what it has once more
            raise RemoteFailure("the node has not reported its runs again yet", subject=node)
        return believed

    async def _clear(self, node: str, status: RunStatus) -> None:
        job, attempt = int(status.job), status.attempt
        status = await self._ended(node, status)
        await self._collector.show_logs(job)  # what is recorded need not be fetched
        if not await self._collector.fetch_logs_of({node: status}, _LOGS_S):
            raise RemoteFailure("not all of its logs could be collected", subject=node)
        await self._collector.fetch_outputs(node, status)
        point("sweep.brought")
        await self._remove(node, job, attempt)

    async def _remove(self, node: str, job: int, attempt: int) -> None:
        await self._removals.request(node, (job, attempt))
        point("conclude.removed")
        self._watch.forget_on(node, job, attempt)
        self._complaints.pop((node, job, attempt), None)
        self._collector.forget(node, job, attempt)

    async def _send_removals(self, node: str, runs: Sequence[tuple[int, int]]) -> Sequence[RemoteFailure | None]:
        return await self._watch.runs(node).remove(runs)

    async def close(self) -> None:
        await self._removals.close()
