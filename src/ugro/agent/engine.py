"""The reconcile loop: looks at jobs and nodes, asks policy, acts, and does so again until nothing is left to do.

It keeps no truth of its own. After a crash it looks at the same database and the same nodes and goes on: a start that
was recorded is asked for again, which the nodes answer with what they already have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from datetime import datetime
from typing import Any

from ugro.agent.launching import Launching
from ugro.agent.logmirror import LogMirror
from ugro.agent.runwatch import RunWatch
from ugro.agent.snapshot import Snapshots
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.failure import Cause, Failure
from ugro.core.job import HOLDING_STATES, Ending, Job, JobState, Tries
from ugro.policy import attempt, decision
from ugro.policy.postmortem import Lost, RankEnd, classify
from ugro.policy.recovery import JobView, Retry, after_failure
from ugro.policy.scheduler import schedule
from ugro.store.jobs import JobStore, StaleMove

log = logging.getLogger(__name__)

_LIVE_S = 0.25
_IDLE_S = 5.0
_LOGS_S = 30.0
_CAUSES = {Ending.TIME_LIMIT: Cause.TIME_LIMIT, Ending.PREEMPTED: Cause.PREEMPTED}


class Engine:
    def __init__(
        self, jobs: JobStore, watch: RunWatch, launching: Launching, snapshots: Snapshots, mirror: LogMirror
    ) -> None:
        self._jobs = jobs
        self._watch = watch
        self._launching = launching
        self._snapshots = snapshots
        self._mirror = mirror
        self._work: dict[tuple[object, ...], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                is_busy = await self._look()
            except UgroError as error:
                log.error("a pass over the jobs failed: %s", error)
                is_busy = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LIVE_S if is_busy or self._work else _IDLE_S):
                    await self._wake.wait()

    async def close(self) -> None:
        for task in self._work.values():
            task.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)
        await self._mirror.close()

    async def _look(self) -> bool:
        holding = await self._jobs.in_states(HOLDING_STATES)
        await self._watch.refresh({node for job in holding for node in _nodes(job)})
        for job in holding:
            await self._step(job)
        return await self._schedule() or bool(holding)

    # --- jobs that hold devices --------------------------------------------------------------------------------

    async def _step(self, job: Job) -> None:
        runs = tuple(self._watch.state(node, job.id, job.attempt) for node in _nodes(job))
        view = attempt.AttemptView(job.state, job.ending, runs, _is_over_time(job))
        step = attempt.next_step(view)
        if job.state is JobState.RUNNING or isinstance(step, attempt.Conclude):
            await self._follow_logs(job)
        match step:
            case attempt.Start(nodes):
                for node in nodes:
                    self._do(("start", job.id, job.attempt, node), self._start_on(job, node))
            case attempt.Stop(nodes):
                for node in nodes:
                    self._do(("stop", job.id, job.attempt, node), self._stop_on(job, node))
            case attempt.Move(state, reason, ending):
                await self._move(job, state, reason, ending)
            case attempt.Conclude():
                self._do(("conclude", job.id, job.attempt), self._conclude(job))

    async def _move(self, job: Job, state: JobState, reason: str, ending: Ending | None) -> None:
        with contextlib.suppress(StaleMove):
            await self._jobs.move(job, state, reason, ending=ending or job.ending)
            self.wake()

    async def _start_on(self, job: Job, node: str) -> None:
        try:
            status = await self._launching.start(job, node)
        except (Unreachable, TimedOut) as error:
            log.warning("cannot start there yet: %s", error, extra={"job": job.id, "node": node})
        except (RemoteFailure, NotFound) as error:
            self._watch.note_problem(node, job.id, job.attempt, error.message)
        else:
            self._watch.learn(node, status)
        self.wake()

    async def _stop_on(self, job: Job, node: str) -> None:
        reason = job.reason or "asked to end"
        try:
            status = await self._watch.runs(node).stop(job.id, job.attempt, reason, job.spec.stop.grace_s)
        except (Unreachable, TimedOut, RemoteFailure) as error:
            log.warning("cannot stop it yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(1.0)
        else:
            self._watch.learn(node, status)
            self.wake()

    async def _follow_logs(self, job: Job) -> None:
        plan = await self._jobs.plan(job)
        for node in plan.nodes if plan else ():
            if self._watch.status(node.node, job.id, job.attempt) is not None:
                for rank in node.ranks:
                    self._mirror.follow(node.node, job.id, job.attempt, rank.rank)

    # --- how it was --------------------------------------------------------------------------------------------

    async def _conclude(self, job: Job) -> None:
        """Every rank has ended: the logs come home, the story is written down, the nodes forget the run."""
        await self._mirror.finish(job.id, job.attempt, _LOGS_S)
        with contextlib.suppress(StaleMove):
            await self._write_down(job)
        for node in _nodes(job):
            with contextlib.suppress(Unreachable, TimedOut, RemoteFailure, NotFound):
                await self._watch.runs(node).remove(job.id, job.attempt)
        self._watch.forget(job.id, job.attempt, _nodes(job))
        self.wake()

    async def _write_down(self, job: Job) -> None:
        job = await self._jobs.get(job.id)
        if job.ending is Ending.CANCELLED:
            await self._jobs.move(job, JobState.CANCELLED, "cancelled; every rank has ended", exit_code=130)
            return
        if job.ending is Ending.DONE:
            await self._jobs.move(job, JobState.SUCCEEDED, "every rank ended with 0", exit_code=0)
            return
        failure = self._failure(job)
        view = JobView(job.spec.retry, job.tries.charged, job.tries.free)
        verdict = after_failure(view, failure, time.time())
        if isinstance(verdict, Retry):
            tries = Tries(verdict.charged, verdict.free, verdict.not_before, verdict.avoid)
            await self._jobs.move(job, JobState.RECOVERING, verdict.reason, ending=None, tries=tries)
        else:
            code = failure.exit_code if failure.exit_code else 1
            await self._jobs.move(job, JobState.FAILED, verdict.reason, exit_code=code)

    def _failure(self, job: Job) -> Failure:
        ends: list[RankEnd] = []
        lost: list[Lost] = []
        for node in _nodes(job):
            status = self._watch.status(node, job.id, job.attempt)
            if status is None or status.outcome in ("start-failed", "never-started"):
                continue
            if status.outcome == "lost":
                lost.append(Lost(node, Cause.SUPERVISOR_LOST))
                continue
            ends += [
                RankEnd(
                    rank=rank.rank,
                    node=node,
                    exit_code=rank.code,
                    signal=rank.signal,
                    ended_unix_s=rank.ended_at or 0.0,
                    last_lines=status.tail if rank.rank == status.failed_rank else (),
                    was_oom_killed=rank.is_oom,
                    was_stopped_by_us=status.outcome == "stopped",
                )
                for rank in status.ranks
            ]
        stopped_for = _CAUSES.get(job.ending) if job.ending else None
        has_culprit = lost or any(end.has_failed and not end.was_stopped_by_us for end in ends)
        if stopped_for is None and not has_culprit:
            return Failure(Cause.START_FAILED, job.reason)
        return classify(ends, lost=lost, stopped_for=stopped_for)

    # --- jobs that wait ----------------------------------------------------------------------------------------

    async def _schedule(self) -> bool:
        waiting = await self._jobs.in_states({JobState.QUEUED, JobState.RECOVERING})
        for job in [job for job in waiting if job.ending is Ending.CANCELLED]:
            with contextlib.suppress(StaleMove):
                await self._jobs.move(job, JobState.CANCELLED, "cancelled before it started", exit_code=130)
        waiting = [job for job in waiting if job.ending is None]
        if not waiting:
            return False
        by_id = {job.id: job for job in waiting}
        for wanted in schedule(await self._snapshots.take(waiting)):
            with contextlib.suppress(StaleMove):
                await self._act(wanted, by_id)
        return True

    async def _act(self, wanted: decision.Decision, waiting: dict[int, Job]) -> None:
        match wanted:
            case decision.Start(job, placement, reason):
                await self._jobs.start(waiting[job], placement, reason)
                self.wake()
            case decision.Preempt(job):
                await self._jobs.ask_to_end(job, Ending.PREEMPTED)
                self.wake()
            case decision.Fail(job, reason):
                await self._jobs.move(waiting[job], JobState.FAILED, reason, exit_code=1)

    def _do(self, key: tuple[object, ...], work: Coroutine[Any, Any, None]) -> None:
        """One task per piece of work: asked for again while it is under way, it just goes on."""
        if key in self._work:
            work.close()
            return
        task = asyncio.create_task(work, name=" ".join(str(part) for part in key))
        self._work[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: tuple[object, ...], task: asyncio.Task[None]) -> None:
        del self._work[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
        self.wake()


def _nodes(job: Job) -> tuple[str, ...]:
    return job.placement.nodes if job.placement else ()


def _is_over_time(job: Job) -> bool:
    if job.spec.time_limit_s is None or job.started_at is None:
        return False
    return time.time() - datetime.fromisoformat(job.started_at).timestamp() > job.spec.time_limit_s
