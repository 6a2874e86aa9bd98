"""What jobs do for the owners of their machines: they make way with a checkpoint, or take a smaller share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

from ugro.agent.support.keyed_tasks import KeyedTasks
from ugro.agent.tracking.owners import Owners
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import Ending, Job
from ugro.core.login import node_of
from ugro.core.owner import Then
from ugro.policy.nodes import owner
from ugro.policy.nodes.owner import Part
from ugro.store.jobs import JobStore

log = logging.getLogger(__name__)

_AGAIN_S = 5.0


class OwnerRequests:
    def __init__(self, jobs: JobStore, watch: RunTracker, owners: Owners, work: KeyedTasks) -> None:
        self._jobs = jobs
        self._watch = watch
        self._owners = owners
        self._work = work
        # What was asked of the ranks last. After a restart all are asked again: nobody knows what the last agent asked.
        self._asked: dict[tuple[int, int, str], Part] = {}

    def look(self, holding: Sequence[Job]) -> list[Awaitable[Job]]:
        """Starts what takes its time in the background; returns the requests to record."""
        owners = self._owners.heard()
        if not owners and not self._asked:
            return []
        self._ask_for_parts(holding, list(owner.parts(holding, owners)))
        return [self._jobs.ask_to_end(stop.job.id, Ending.OWNER) for stop in owner.stops(holding, owners)]

    def why(self, job: Job) -> str | None:
        """Whose machine a job has made way for, while that can be said."""
        if job.ending is not Ending.OWNER or job.placement is None:
            return None
        reports = ((name, self._owners.report(name)) for name in job.placement.node_names)
        return next((owner.makes_way(name, one) for name, one in reports if one is not None and one.is_there), None)

    def _ask_for_parts(self, holding: Sequence[Job], wanted: list[Part]) -> None:
        alive = {(job.id, job.attempt): job for job in holding}
        self._asked = {key: one for key, one in self._asked.items() if key[:2] in alive}
        for one in [*wanted, *self._restored(alive, wanted)]:
            key = (one.job.id, one.job.attempt, one.node)
            if key not in self._asked or self._asked[key].part != one.part:
                self._work.do(("part", *key), partial(self._ask, one))

    def _restored(self, alive: dict[tuple[int, int], Job], wanted: list[Part]) -> list[Part]:
        """Where shares were small and the rule is another one now, they are no longer."""
        kept = {(one.job.id, one.job.attempt, one.node) for one in wanted}
        return [
            replace(one, job=alive[key[:2]], part=1.0)
            for key, one in self._asked.items()
            if key not in kept and not self._shrinks(key[2])
        ]

    def _shrinks(self, login: str) -> bool:
        report = self._owners.report(node_of(login))
        return report is not None and report.then is Then.SHRINK

    async def _ask(self, one: Part) -> None:
        job, node = one.job, one.node
        try:
            await self._watch.runs(node).take_part(job.id, job.attempt, one.part, binds_cores=one.is_of_cores)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.warning("its share cannot be changed yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(_AGAIN_S)
            return
        before = self._asked.get((job.id, job.attempt, node))
        self._asked[job.id, job.attempt, node] = one
        if one.part < 1 or (before is not None and before.part < 1):
            await self._jobs.note("owner", owner.takes(one), job=job, node=node)
