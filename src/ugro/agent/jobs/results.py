"""A job's results for clients: what has arrived, what is being transferred, what stayed on nodes; and their removal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ugro.agent.artifacts.collector import Collector
from ugro.agent.artifacts.job_folder import CONFIG, attempt_folder, delete_results
from ugro.agent.artifacts.output_store import Arrived, shown
from ugro.agent.artifacts.result_files import LOG_TIMES
from ugro.agent.support.aio import to_the_end
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotAllowed, NotFound, UgroError
from ugro.core.job import Job, JobState
from ugro.core.metrics import MetricsSummary, summarise
from ugro.core.results import JobResults, NodeResults, Part, ResultFile, ResultState
from ugro.policy.experiments.comparison import Row, Side, compare
from ugro.store.database import Store

log = logging.getLogger(__name__)

_MOST_LISTED = 1000
_MOST_SUMMED_UP = 64
_METRICS = "metrics.jsonl"
_UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE, JobState.STOPPING})


class ResultService:
    def __init__(self, folder: Path, store: Store, watch: RunTracker, collector: Collector) -> None:
        self._folder = folder
        self._jobs = store.jobs
        self._environments = store.environments
        self._watch = watch
        self._collector = collector
        self._summed_up: dict[tuple[str, int, int], MetricsSummary | None] = {}

    async def of(self, asked: Job, attempt: int | None = None) -> JobResults:
        job = asked if asked.cached_from is None else await self._jobs.get(asked.cached_from)
        tries = {one.number: one.placement.nodes for one in await self._jobs.attempts(job.id)}
        number = attempt or job.attempt
        if attempt is not None and number not in tries:
            raise NotFound(f"job {job.id} has no attempt {attempt}", hint=f"it has {len(tries)}")
        if job.attempt:
            await self._collector.show_logs(job.id)
            await self._collector.describe(job.id)
        nodes = tries.get(number, ())
        parts = [
            await asyncio.to_thread(self._node, job, number, node, is_first=node == nodes[0]) for node in nodes
        ]
        return await asyncio.to_thread(self._all, job, number, tuple(parts))

    async def parts(self, asked: Job) -> tuple[Part, ...]:
        """Where the files of its newest attempt are; none before it started."""
        job = asked if asked.cached_from is None else await self._jobs.get(asked.cached_from)
        if not job.attempt:
            return ()
        await self._collector.show_logs(job.id)
        await self._collector.describe(job.id)
        return await asyncio.to_thread(lambda: tuple(self._parts(job.id, self._folder / str(job.id), job.attempt)))

    async def compare(self, jobs: Sequence[Job]) -> tuple[Row, ...]:
        sides = []
        for job in jobs:
            made = await self.of(job)
            ran = job if job.cached_from is None else await self._jobs.get(job.cached_from)
            sides.append(Side(job, await self._environments.of(ran.id, ran.attempt), made.metrics, made.files))
        return compare(sides)

    async def remove(self, job: Job, reason: str = "removed by their user") -> tuple[str, ...]:
        """Removes outputs and checkpoints, here and on the nodes; logs stay. Returns what failed, in sentences."""
        if not job.is_final:
            problem = f"job {job.id} is {job.state}: its results are not complete yet"
            raise NotAllowed(problem, hint=f"ugro cancel {job.id}")
        if job.cached_from is not None:
            raise NotAllowed(
                f"job {job.id} has none of its own: they are job {job.cached_from}'s",
                hint=f"ugro results {job.cached_from} --rm",
            )
        # Recorded first: outputs found on a node later are not collected any more.
        await self._jobs.note_results_removed(job, reason)
        await to_the_end(partial(delete_results, self._folder / str(job.id)))
        nodes = {node: None for one in await self._jobs.attempts(job.id) for node in one.placement.nodes}
        problems = await asyncio.gather(*(self._drop(job.id, node) for node in nodes))
        return tuple(problem for problem in problems if problem is not None)

    async def _drop(self, job: int, node: str) -> str | None:
        try:
            await self._collector.drop_kept(job, node)
        except NotFound:
            return None
        except UgroError as error:
            return f"results on {node} could not be removed: {error}"
        return None

    # --- looking -----------------------------------------------------------------------------------------------

    def _node(self, job: Job, attempt: int, node: str, *, is_first: bool) -> NodeResults:
        progress = self._collector.outputs(job.id, attempt, node, is_first=is_first)
        if isinstance(progress, Arrived):
            return _arrived(node, progress)
        status = self._watch.status(node, job.id, attempt)
        is_live = attempt == job.attempt and job.state in _UNDER_WAY
        state = ResultState.LIVE
        if not is_live:
            state = ResultState.NONE if job.results_removed_at is None else ResultState.REMOVED
            if status is not None and status.has_outputs:
                state = ResultState.COMING
            elif status is None and self._watch.silent_s(node):
                state = ResultState.UNKNOWN
        if progress is None:
            return NodeResults(node, state)
        if progress.problem is not None:
            state = ResultState.WAITING
        missing = (progress.missing_files, progress.missing_bytes)
        here = (progress.files - missing[0], progress.bytes - missing[1])
        return NodeResults(node, state, *here, *missing, progress.problem)

    def _all(self, job: Job, attempt: int, nodes: Sequence[NodeResults]) -> JobResults:
        folder = self._folder / str(job.id)
        parts = tuple(self._parts(job.id, folder, attempt))
        files = [file for part in parts for file in _files(part)]
        return JobResults(
            job.id,
            attempt,
            str(folder),
            _together(job, nodes),
            len(files),
            sum(file.bytes for file in files),
            tuple(files[:_MOST_LISTED]),
            tuple(nodes),
            parts,
            self._metrics(attempt_folder(folder, attempt) / "output" / _METRICS),
            job.results_removed_at,
        )

    def _metrics(self, path: Path) -> MetricsSummary | None:
        """Cached by size and time of the file: clients that wait for results ask again and again."""
        with contextlib.suppress(OSError), path.open("rb") as lines:
            about = os.fstat(lines.fileno())
            key = (str(path), about.st_size, about.st_mtime_ns)
            if key not in self._summed_up:
                while len(self._summed_up) >= _MOST_SUMMED_UP:
                    self._summed_up.pop(next(iter(self._summed_up)))
                self._summed_up[key] = summarise(lines)
            return self._summed_up[key]
        return None

    def _parts(self, job: int, folder: Path, attempt: int) -> Iterator[Part]:
        newest = attempt_folder(folder, attempt)
        is_theirs = (newest / "output" / CONFIG).exists()
        yield Part("job." + CONFIG if is_theirs else CONFIG, str(folder / CONFIG))
        yield Part("logs", str(newest / "logs"))
        yield Part("", str(newest / "output"))
        yield Part("nodes", str(newest / "nodes"))
        if (checkpoint := self._collector.checkpoint(job)) is not None:
            inside = f"/{checkpoint.name}" if checkpoint.found.kind == "folder" else ""
            yield Part(f"checkpoints{inside}", checkpoint.path)


def _arrived(node: str, arrived: Arrived) -> NodeResults:
    has_some = arrived.files or arrived.left_count or arrived.same
    found = NodeResults(node, ResultState.HOME if has_some else ResultState.NONE, arrived.files, arrived.bytes)
    return replace(found, left=arrived.left, left_count=arrived.left_count, unsendable=arrived.unsendable)


def _together(job: Job, nodes: Sequence[NodeResults]) -> ResultState:
    if job.results_removed_at is not None:
        return ResultState.REMOVED
    states = {one.state for one in nodes}
    return next((state for state in ResultState if state in states), ResultState.NONE)


def _files(part: Part) -> Iterator[ResultFile]:
    path = os.fsencode(part.path)
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            yield ResultFile(part.name, os.path.getsize(path))
    prefix = f"{part.name}/" if part.name else ""
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            whole = os.path.join(folder, name)
            if not (part.name == "logs" and name.endswith(LOG_TIMES)):
                with contextlib.suppress(OSError):
                    relative = shown(os.path.relpath(whole, path))
                    yield ResultFile(prefix + relative, os.lstat(whole).st_size)
