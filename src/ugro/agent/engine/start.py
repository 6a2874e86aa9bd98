"""Starting an attempt's ranks on all its nodes at once, or saying why it cannot be.

What is only in memory here (whom we asked, why not) is found out anew after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ugro.agent.engine.launch import Launching
from ugro.agent.engine.leases import Leases
from ugro.agent.engine.preflight import LaunchRefused
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.failure import Cause, Failure
from ugro.core.job import Job

log = logging.getLogger(__name__)

# A node that was fit to be chosen and then cannot be talked to for so long is passed over.
_PREPARE_S = 20.0
# From asking to every rank running; the program may be on a slow file server.
_START_S = 120.0
_AGAIN_S = 0.5
_NO_CODE = "no-code"
_PASSING = frozenset({"busy", "crashed", "cancelled", _NO_CODE})

Key = tuple[int, int]  # job and attempt


class Starting:
    def __init__(self, launching: Launching, watch: RunWatch, leases: Leases) -> None:
        self._launching = launching
        self._leases = leases
        self._watch = watch
        self._since: dict[Key, float] = {}
        self._asked_at: dict[Key, float] = {}
        self._asked: dict[Key, set[str]] = {}  # only for attempts whose start was decided by this very process
        self._refusals: dict[Key, Failure] = {}

    def decided(self, job: Job) -> None:
        self._asked[job.id, job.attempt] = set()

    def refusal(self, job: Job) -> Failure | None:
        return self._refusals.get((job.id, job.attempt))

    def is_overdue(self, job: Job) -> bool:
        key = (job.id, job.attempt)
        if key not in self._since and key not in self._asked:
            # Asked for by an agent before us: it has as long as if it had been now.
            self._asked_at.setdefault(key, time.monotonic())
        asked_at = self._asked_at.get(key)
        return asked_at is not None and time.monotonic() - asked_at > _START_S

    def was_never_asked(self, job: Job, node: str) -> bool:
        asked = self._asked.get((job.id, job.attempt))
        return asked is not None and node not in asked

    def forget(self, job: int, attempt: int) -> None:
        for known in (self._since, self._asked_at, self._asked, self._refusals):
            known.pop((job, attempt), None)
        self._launching.forget(job, attempt)

    async def start(self, job: Job, nodes: tuple[str, ...]) -> None:
        """May be cancelled at any point: whom we asked is known, and is asked to stop."""
        self._note_begun(job)
        try:
            await self._launching.bring_code([job], nodes)
            await self._launching.plan(job)
        except LaunchRefused as error:
            self._refuse(job, error.failure)
        except (Unreachable, TimedOut) as error:
            if self._is_late(job):
                self._refuse(job, Failure(Cause.START_FAILED, str(error), node=error.subject, hint=error.hint))
            await asyncio.sleep(_AGAIN_S)
        except UgroError as error:
            if _is_passing(error) and error.subject:
                self._launching.forget_code(job, error.subject)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._refuse(job, Failure(Cause.START_FAILED, str(error), node=error.subject, hint=error.hint))
        else:
            point("start.planned")
            await self._start_on_all(job, nodes)

    async def _start_on_all(self, job: Job, nodes: tuple[str, ...]) -> None:
        """Rank 0's node first: a rank that connects before rank 0 listens is refused, and retries after a pause."""
        first = [node for node in nodes if job.placement is not None and node == job.placement.nodes[0]]
        for some in (first, [node for node in nodes if node not in first]):
            await asyncio.gather(*(self._start_on(job, node) for node in some))

    async def start_many(self, jobs: Sequence[Job], node: str) -> list[Job]:
        """Small ones, each of this node alone. Returns those to be asked for again."""
        for job in jobs:
            self._note_begun(job)
        if not await self._has_code(jobs, node):
            return [job for job in jobs if (job.id, job.attempt) not in self._refusals]
        for job in jobs:
            self._note_asked(job, node)
        point("many.asked")
        try:
            results = await self._launching.start_many(jobs, node)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.warning("cannot start there yet: %s", error, extra={"node": node})
            return list(jobs)
        point("many.answered")
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, UgroError):
                self._hear_refusal(job, node, result)
            elif (job.id, job.attempt) in self._asked_at:  # else it is over by now, and gone from the node
                self._watch.learn(node, result)
        again = [isinstance(result, UgroError) and _is_passing(result) for result in results]
        return [job for job, is_again in zip(jobs, again, strict=True) if is_again]

    async def _has_code(self, jobs: Sequence[Job], node: str) -> bool:
        """False when what they run in is not there yet, or never will be."""
        try:
            await self._launching.bring_code(jobs, [node])
        except UgroError as error:
            log.warning("cannot bring code there yet: %s", error, extra={"node": node})
            may_pass = isinstance(error, Unreachable | TimedOut) or _is_passing(error)
            for job in jobs:
                if not may_pass or self._is_late(job):
                    self._refuse(job, Failure(Cause.START_FAILED, str(error), node=node, hint=error.hint))
            return False
        return True

    def _is_late(self, job: Job) -> bool:
        """Code that is on its way may take hours; it goes on where it was."""
        since = self._since[job.id, job.attempt]
        return time.monotonic() - max(since, self._launching.code_moved_at(job)) > _PREPARE_S

    async def _start_on(self, job: Job, node: str) -> None:
        try:
            as_of = await self._leases.begin(job, node)
            self._note_asked(job, node)
            point("start.asked")
            status = await self._launching.start(job, node, as_of)
        except (Unreachable, TimedOut) as error:
            log.warning("cannot start there yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(_AGAIN_S)
        except UgroError as error:
            self._hear_refusal(job, node, error)
            await asyncio.sleep(_AGAIN_S)
        else:
            point("start.answered")
            self._watch.learn(node, status)

    def _note_begun(self, job: Job) -> None:
        """An agent before us may have asked already: then the time that ranks have to start begins anew."""
        key = (job.id, job.attempt)
        if key not in self._since:
            self._since[key] = time.monotonic()
            self._asked_at.pop(key, None)

    def _note_asked(self, job: Job, node: str) -> None:
        key = (job.id, job.attempt)
        self._asked_at.setdefault(key, time.monotonic())
        if key in self._asked:
            self._asked[key].add(node)

    def _hear_refusal(self, job: Job, node: str, error: UgroError) -> None:
        if isinstance(error, RemoteFailure) and error.cause == _NO_CODE:
            self._launching.forget_code(job, node)
        if not _is_passing(error):
            is_rebooted = isinstance(error, RemoteFailure) and error.cause == "other-boot"
            cause = Cause.NODE_REBOOTED if is_rebooted else Cause.START_FAILED
            self._refuse(job, Failure(cause, f"{node}: {error.message}", node=node, hint=error.hint))

    def distrust(self, job: Job) -> None:
        """An attempt failed: what was found out about its nodes is found out anew before the next."""
        self._launching.preflight.forget(job.placement.nodes if job.placement else ())

    def _refuse(self, job: Job, failure: Failure) -> None:
        self._refusals.setdefault((job.id, job.attempt), failure)


def _is_passing(error: UgroError) -> bool:
    return isinstance(error, RemoteFailure) and error.cause in _PASSING
