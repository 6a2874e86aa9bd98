"""What is on the nodes and belongs to no attempt under way: ended, its logs and outputs brought home, removed.

So the run directory of a job that is over goes only after all of it was acknowledged, and the ranks of an attempt that
was given up while its node was away end as soon as the node is back.
"""

from __future__ import annotations

import asyncio
import logging

from ugro.agent.artifacts.collector import Collector
from ugro.agent.artifacts.file_store import DiskFull
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import HOLDING_STATES
from ugro.nodes.runs import RunStatus
from ugro.store.jobs import JobStore

log = logging.getLogger(__name__)

_GRACE_S = 5.0
_LOGS_S = 60.0
_AGAIN_S = 5.0


class Sweep:
    def __init__(self, jobs: JobStore, watch: RunWatch, home: Collector) -> None:
        self._jobs = jobs
        self._watch = watch
        self._home = home

    async def clear(self, node: str, status: RunStatus) -> None:
        if await self._is_under_way(status):
            return
        point("sweep.found")
        try:
            await self._clear(node, status)
        except (Unreachable, TimedOut, RemoteFailure, NotFound, DiskFull) as error:
            log.warning("a run is left there for now: %s", error, extra={"node": node, "job": status.job})
            await asyncio.sleep(_AGAIN_S)

    async def _is_under_way(self, status: RunStatus) -> bool:
        """Asked anew: it may have been started since the list was made by which it is none of ours."""
        try:
            job = await self._jobs.get(int(status.job))
        except NotFound:
            return False
        return job.state in HOLDING_STATES and job.attempt == status.attempt

    async def _clear(self, node: str, status: RunStatus) -> None:
        job, attempt = int(status.job), status.attempt
        runs = self._watch.runs(node)
        if not status.has_ended:
            log.info("ending a run that is over", extra={"node": node, "job": job, "attempt": attempt})
            status = await runs.stop(job, attempt, "this attempt is over", _GRACE_S)
            self._watch.learn(node, status)
            point("sweep.stopped")
        await self._home.show_logs(job)  # what is recorded need not be fetched
        if not await self._home.bring_logs_of({node: status}, _LOGS_S):
            raise RemoteFailure("not all of its logs could be brought home", subject=node)
        await self._home.bring_results(node, status)
        point("sweep.brought")
        [failure] = await runs.remove([(job, attempt)])
        if failure is not None:
            raise failure
        point("conclude.removed")
        self._watch.forget_on(node, job, attempt)
        self._home.forget_logs(node, job, attempt)
