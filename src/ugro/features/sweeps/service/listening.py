"""Follows the metrics of running trials as they are written: a trial is judged by its newest value at once.

What is heard here is only used to judge. The metrics of a job are collected, stored and shown as those of every other
job, which may take a few seconds, and a trial that has ended by itself is recorded from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ugro.kernel.files.results.log_mirror import age_s
from ugro.kernel.jobs.engine.rules.reported_run import most_log_bytes
from ugro.kernel.jobs.engine.runs import Piece
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.telemetry import readers as ugro
from ugro.kernel.telemetry.readers import Origin
from ugro.kernel.telemetry.readers import Piece as Unread

log = logging.getLogger(__name__)

FILE = "output/metrics.jsonl"  # in the folder of a run: what ``ugro.train`` and scripts write
_AGAIN_S = 1.0

Run = tuple[int, int]  # job and attempt
Series = dict[tuple[int, int], list[tuple[int, float]]]  # steps and values, by attempt and rank


class RunFiles(Protocol):
    def follow(
        self, run: Run, file: str, offset: int, most_bytes: Callable[[], int], *, promptly: bool = False
    ) -> AsyncIterator[Piece]: ...


class Listening:
    def __init__(self, runs: Callable[[str], RunFiles], again_s: float = _AGAIN_S) -> None:
        """``runs``: of a node; raises UgroError for one that is not known."""
        self.grown = ChangeSignal()  # a value was heard
        self._runs = runs
        self._again_s = again_s
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Run, asyncio.Task[None]] = {}
        self._heard: dict[int, Series] = {}  # by job

    def begin(self, group: asyncio.TaskGroup) -> None:
        """What was heard by an earlier group is heard again."""
        self._group = group
        self._tasks.clear()
        self._heard.clear()

    def follow(self, job: Job, metric: str) -> None:
        """Starts to listen to the first node of a running job; once for each attempt."""
        run = (job.id, job.attempt)
        if run in self._tasks or job.state is not JobState.RUNNING or job.placement is None or self._group is None:
            return
        name = f"metrics of job {job.id}, attempt {job.attempt}"
        self._tasks[run] = self._group.create_task(self._listen(job, job.placement.nodes[0], metric), name=name)

    def heard(self, job: int) -> Series:
        return self._heard.get(job, {})

    def forget(self, job: int) -> None:
        self._heard.pop(job, None)
        for run in [run for run in self._tasks if run[0] == job]:
            self._tasks.pop(run).cancel()

    async def _listen(self, job: Job, node: str, metric: str) -> None:
        reading = _Reading(job.attempt, metric, self._heard.setdefault(job.id, {}))
        placed = job.attempt_started or job.submitted
        while True:
            try:
                pieces = self._runs(node).follow(
                    (job.id, job.attempt), FILE, reading.offset, lambda: most_log_bytes(age_s(placed)), promptly=True
                )
                async for piece in pieces:
                    if reading.take(piece):
                        self.grown.notify()
                return
            except (Unreachable, TimedOut, RemoteFailure) as error:
                log.debug("metrics are not followed now: %s", error, extra={"job": job.id, "node": node})
                await asyncio.sleep(self._again_s)
            except UgroError as error:  # the node was removed, or its answer is wrong: its metrics are still collected
                log.info("metrics are no longer followed: %s", error, extra={"job": job.id, "node": node})
                return


class _Reading:
    """The values of one metric in a file that arrives in pieces."""

    def __init__(self, attempt: int, metric: str, series: Series) -> None:
        self.offset = 0
        self._attempt = attempt
        self._metric = metric
        self._series = series
        self._rest = b""  # the last line, which is not complete

    def take(self, piece: Piece) -> bool:
        """Whether it had a value."""
        self._rest = self._rest + piece.content if piece.offset == self.offset else piece.content
        self.offset = piece.offset + len(piece.content)
        found = ugro.read(Unread(self._rest, 0, len(self._rest), ""))
        self._rest = self._rest[found.end :]
        has_any = False
        for key, points in found.points.items():
            if key.name == self._metric and key.origin is Origin.UGRO:
                known = self._series.setdefault((self._attempt, key.rank or 0), [])
                known += zip(points.steps, points.values, strict=True)
                has_any = True
        return has_any
