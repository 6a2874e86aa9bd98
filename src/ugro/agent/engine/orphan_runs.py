"""Runs on nodes that belong to no attempt under way: ended, their logs and outputs collected, removed.

So the run directory of a job that is over goes only after all of it was acknowledged, and the ranks of an attempt that
was given up while its node was away end as soon as the node is back. Of a job that was removed nothing is collected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ugro.agent.artifacts.collector import Collector
from ugro.agent.artifacts.file_store import DiskFull
from ugro.agent.engine.batcher import Batcher
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import HOLDING_STATES, Job
from ugro.nodes.runs import RunStatus
from ugro.store.jobs import JobStore

log = logging.getLogger(__name__)

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
