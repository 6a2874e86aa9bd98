"""Small commands, many at once: one call to a node starts, and one removes, what has come together; one commit ends it.

A command is small when it needs nothing but a place to run: one process, no GPU, no lease, nothing to set up. It takes
the same steps as any other job. Whatever does not go well is left to the way that all jobs go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from ugro.agent.artifacts.collector import Collector
from ugro.agent.engine.leases import lease_s
from ugro.agent.engine.start import Starting
from ugro.agent.support.crashpoint import point
from ugro.agent.support.keyed_tasks import Work
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.errors import UgroError
from ugro.core.job import Job, Launcher
from ugro.nodes.runs import RunStatus
from ugro.store.jobs import JobStore, StaleMove
from ugro.store.smalllogs import SmallLog

log = logging.getLogger(__name__)

Batch = Callable[[Sequence[Job]], Coroutine[Any, Any, None]]

_MOST_AT_ONCE = 250
# Most are over by then, and their log comes with the news of it: nobody has to ask.
PATIENCE_S = 0.2
_REST_S = 0.5
_FAILED_REST_S = 2.0
# What nodes keep of runs that are over is removed when no more end, so that others may start meanwhile. Folders in
# which the next runs can begin go as soon as some have come together: to make a new one takes a node longer than all
# else that it does for a small command.
_CALM_S = 0.5
_MOST_LEFT = 1000
_MOST_REUSABLE = 32


def is_light(job: Job) -> bool:
    spec = job.spec
    if spec.launcher is not Launcher.COMMAND or spec.setup or spec.has_checkpoints or spec.is_cached:
        return False
    return lease_s(job) is None and job.placement is not None and not job.placement.shares[0].gpus


class Light:
    def __init__(self, jobs: JobStore, watch: RunWatch, starting: Starting, home: Collector, work: Work) -> None:
        self._jobs = jobs
        self._watch = watch
        self._starting = starting
        self._home = home
        self._work = work
        # Apart from each other: a run may be over before the others of its batch have started.
        self._being_started: set[tuple[int, int]] = set()
        self._being_ended: set[tuple[int, int]] = set()
        self._starts: dict[str, list[Job]] = {}
        self._ends: dict[str, list[Job]] = {}
        self._last_words: dict[tuple[int, int], RunStatus] = {}  # of those that end, with their logs
        # Runs whose end is recorded, by the node that keeps their folders, and whether those can be used again.
        self._left: dict[tuple[str, bool], list[RunStatus]] = {}
        self._being_removed: set[tuple[int, int]] = set()
        self._ended_at = 0.0  # the last of those
        self._since: dict[tuple[int, int], float] = {}
        self._resting: dict[tuple[int, int], float] = {}  # until when it is not asked for again
        self._batches = 0
        self.on_end: Callable[[], None] = lambda: None  # some have ended, and others may start

    def start(self, job: Job, node: str) -> None:
        if not self._is_resting(job):
            _note(self._starts, self._being_started, job, node)

    def finish(self, job: Job) -> bool:
        """Every rank has ended with 0. False when its log or its outputs have to be fetched first."""
        (node,) = job.placement.nodes if job.placement else ()
        status = self._watch.status(node, job.id, job.attempt)
        if not self.is_ending(job) and not self._is_resting(job):
            if status is None or status.logs is None or status.has_outputs:
                return False
            self._last_words[job.id, job.attempt] = status
            _note(self._ends, self._being_ended, job, node)
        return True

    def is_starting(self, job: Job) -> bool:
        return (job.id, job.attempt) in self._being_started

    def is_ending(self, job: Job) -> bool:
        return (job.id, job.attempt) in self._being_ended

    def busy(self) -> set[tuple[int, int]]:
        return self._being_started | self._being_ended | self._being_removed

    def may_follow(self, job: Job) -> bool:
        """Whether it has been running for so long that somebody may want to see what it writes."""
        (node,) = job.placement.nodes if job.placement else ()
        status = self._watch.status(node, job.id, job.attempt)
        if status is None or (status.has_ended and status.logs is not None):
            return False
        return not self.may_be_over_soon(job)

    def may_be_over_soon(self, job: Job) -> bool:
        """Then it is not worth the while to write down that it runs."""
        now = _now()
        return now - self._since.setdefault((job.id, job.attempt), now) < PATIENCE_S

    @property
    def is_patient(self) -> bool:
        """Some have to be looked at again before long."""
        now = _now()
        return bool(self._left) or any(now - since < PATIENCE_S for since in self._since.values())

    def flush(self) -> None:
        """Begins what was noted in this pass."""
        starts, self._starts = self._starts, {}
        ends, self._ends = self._ends, {}
        for node, jobs in starts.items():
            self._begin(jobs, partial(self._start_many, node), self._being_started)
        for node, jobs in ends.items():
            self._begin(jobs, partial(self._finish_many, node), self._being_ended)
        is_calm = _now() - self._ended_at > _CALM_S
        for (node, is_reusable), told in list(self._left.items()):
            if is_calm or len(told) >= (_MOST_REUSABLE if is_reusable else _MOST_LEFT):
                del self._left[node, is_reusable]
                self._batches += 1
                self._work.do(("batch", self._batches), partial(self._remove_all, node, told))

    def forget(self, under_way: set[tuple[int, int]]) -> None:
        self._since = {key: since for key, since in self._since.items() if key in under_way}
        self._resting = {key: until for key, until in self._resting.items() if key in under_way}
        is_needed = self._being_ended | under_way
        self._last_words = {key: status for key, status in self._last_words.items() if key in is_needed}

    def _is_resting(self, job: Job) -> bool:
        until = self._resting.get((job.id, job.attempt))
        return until is not None and until > _now()

    def _begin(self, jobs: Sequence[Job], work: Batch, busy: set[tuple[int, int]]) -> None:
        for first in range(0, len(jobs), _MOST_AT_ONCE):
            part = jobs[first : first + _MOST_AT_ONCE]
            self._batches += 1
            self._work.do(("batch", self._batches), partial(self._do, part, work, busy))

    async def _do(self, jobs: Sequence[Job], work: Batch, busy: set[tuple[int, int]]) -> None:
        is_done = False
        try:
            await work(jobs)
            is_done = True
        finally:
            if not is_done:
                self._rest(jobs, _FAILED_REST_S)
            busy -= {(job.id, job.attempt) for job in jobs}

    def _rest(self, jobs: Iterable[Job], pause_s: float) -> None:
        self._resting.update({(job.id, job.attempt): _now() + pause_s for job in jobs})

    async def _start_many(self, node: str, jobs: Sequence[Job]) -> None:
        self._rest(await self._starting.start_many(jobs, node), _REST_S)

    async def _finish_many(self, node: str, jobs: Sequence[Job]) -> None:
        told = [self._last_words[job.id, job.attempt] for job in jobs]
        point("many.ended")
        logs = [SmallLog(job.id, job.attempt, status.logs or ()) for job, status in zip(jobs, told, strict=True)]
        await self._home.let_go(logs)
        point("many.logged")
        ended = await self._jobs.finish_many(zip(jobs, logs, strict=True))
        point("many.recorded")
        self.on_end()
        for outcome, status in zip(ended, told, strict=True):
            if isinstance(outcome, Job):
                self._starting.forget(outcome.id, outcome.attempt)
                self._being_removed.add((outcome.id, outcome.attempt))
                is_reusable = outcome.spec.snapshot is None
                self._left.setdefault((node, is_reusable), []).append(status)
        self._ended_at = _now()
        for outcome, written in zip(ended, logs, strict=True):
            # One that was told to end meanwhile goes the usual way; what it wrote is at hand.
            if isinstance(outcome, StaleMove):
                await self._home.small_logs.keep(written, time.time())
            elif isinstance(outcome, Exception):
                raise outcome

    async def _remove_all(self, node: str, told: Sequence[RunStatus]) -> None:
        for first in range(0, len(told), _MOST_AT_ONCE):
            await self._remove(node, told[first : first + _MOST_AT_ONCE])

    async def _remove(self, node: str, told: Sequence[RunStatus]) -> None:
        runs = [(int(status.job), status.attempt) for status in told]
        try:
            results = await self._watch.runs(node).remove(runs)
        except UgroError as error:
            log.info("the sweep will remove what stays: %s", error, extra={"node": node})
            return
        finally:
            self._being_removed -= set(runs)
        point("many.removed")
        for (job, attempt), failure in zip(runs, results, strict=True):
            if failure is None:
                self._watch.forget_on(node, job, attempt)
                self._home.forget_logs(node, job, attempt)


def _note(noted: dict[str, list[Job]], busy: set[tuple[int, int]], job: Job, node: str) -> None:
    if (job.id, job.attempt) not in busy:
        busy.add((job.id, job.attempt))
        noted.setdefault(node, []).append(job)


def _now() -> float:
    return asyncio.get_running_loop().time()
