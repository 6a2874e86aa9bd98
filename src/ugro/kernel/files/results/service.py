"""A job's results for clients: what has arrived, what is being transferred, what stayed on nodes; and their removal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ugro.features.experiments.rules.comparison import Row, Side, compare
from ugro.features.training.model import JobEnergy
from ugro.kernel.access import caller
from ugro.kernel.files.model import JobResults, NodeResults, Part, ResultFile, ResultState
from ugro.kernel.files.results.collector import Collector
from ugro.kernel.files.results.job_folder import CONFIG, attempt_folder, delete_results, earlier_checkpoints
from ugro.kernel.files.results.output_store import LOG_TIMES, Arrived, shown, with_left
from ugro.kernel.files.results.output_sync import Progress
from ugro.kernel.jobs.config.file import settings
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.kernel.telemetry.model import Measured, StepTotals, read_totals, summary
from ugro.kernel.telemetry.rules import all_parameters, parameters
from ugro.node import foreign
from ugro.node.globs import Glob

log = logging.getLogger(__name__)

MOST_LISTED = 1000
_MOST_SUMMED_UP = 64
_METRICS = "metrics.jsonl"
_MOST_TOTALLED = 1 << 30  # bytes of a file with metrics
_UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE, JobState.STOPPING})


Measure = Callable[[int, int], Awaitable[Measured]]  # of a job, up to an attempt
EnergyOf = Callable[[Job, int | None], Awaitable[JobEnergy | None]]  # of an attempt; None: not measured


class ResultService:
    def __init__(
        self,
        folder: Path,
        store: Store,
        watch: RunTracker,
        collector: Collector,
        measure: Measure,
        energy_of: EnergyOf,
    ) -> None:
        self._measure = measure
        self._energy_of = energy_of
        self._folder = folder
        self._jobs = store.jobs
        self._environments = store.environments
        self._trials = store.trials
        self._watch = watch
        self._collector = collector
        self._summed_up: dict[tuple[str, int, int], StepTotals | None] = {}

    async def of(self, asked: Job, attempt: int | None = None, *, most_listed: int | None = MOST_LISTED) -> JobResults:
        """With the names of that many files; None: of all."""
        job, number = await self._asked(asked, attempt)
        if job.attempt:
            await self._collector.show_logs(job.id)
            await self._collector.describe(job.id)
        nodes = await self._on_nodes(job, number)
        found = await asyncio.to_thread(self._all, job, number, nodes, most_listed)
        steps = await asyncio.to_thread(self._steps, attempt_folder(self._folder / str(job.id), number))
        metrics, energy = summary(await self._measure(job.id, number), steps), await self._energy_of(job, number)
        return replace(found, metrics=metrics, energy=energy, forecast=await self._trials.forecast(job.id))

    async def brief(self, asked: Job) -> JobResults:
        """How many files of the newest attempt are here and on the nodes, without their names; asks no node."""
        job, number = await self._asked(asked, None)
        nodes = await self._on_nodes(job, number)
        files, size = sum(node.files for node in nodes), sum(node.bytes for node in nodes)
        folder = self._folder / str(job.id)
        before = await asyncio.to_thread(_left_before, folder, number)
        state = _together(job, nodes)
        return JobResults(job.id, number, str(folder), state, files, size, (), nodes, (), left_before=before)

    async def _asked(self, asked: Job, attempt: int | None) -> tuple[Job, int]:
        """The job whose files these are, and the attempt."""
        job = asked if asked.cached_from is None else await self._jobs.get(asked.cached_from)
        if attempt is not None:
            numbers = [one.number for one in await self._jobs.attempts(job.id)]
            if attempt not in numbers:
                raise NotFound(f"job {job.id} has no attempt {attempt}", hint=f"it has {len(numbers)}")
        return job, attempt or job.attempt

    async def _on_nodes(self, job: Job, attempt: int) -> tuple[NodeResults, ...]:
        tries = {one.number: one.placement.nodes for one in await self._jobs.attempts(job.id)}
        nodes = tries.get(attempt, ())
        is_pending = job.spec.has_checkpoints and await self._jobs.is_to_keep(job.id)
        look = partial(self._node, job, attempt, is_pending=is_pending)
        return tuple([await asyncio.to_thread(look, node, is_first=node == nodes[0]) for node in nodes])

    async def fetch(self, asked: Job, patterns: Sequence[str], attempt: int | None = None) -> None:
        """Starts to fetch what was left on the nodes, all of it or what matches; ``of`` says how far that is."""
        job, number = await self._asked(asked, attempt)
        if not job.is_final:
            raise NotAllowed(f"job {job.id} is {job.state}: it has left nothing yet", hint=f"ugro wait {job.id}")
        tries = {one.number: one.placement.nodes for one in await self._jobs.attempts(job.id)}
        is_named = partial(_is_named, [Glob(one) for one in patterns])
        await self._collector.fetch_left(job, number, tries.get(number, ()), is_named)

    async def parts(self, asked: Job) -> tuple[Part, ...]:
        """Where the files of its newest attempt are; none before it started."""
        job = asked if asked.cached_from is None else await self._jobs.get(asked.cached_from)
        if not job.attempt:
            return ()
        await self._collector.show_logs(job.id)
        await self._collector.describe(job.id)
        return await asyncio.to_thread(lambda: tuple(self._parts(job, self._folder / str(job.id), job.attempt)))

    async def compare(self, jobs: Sequence[Job]) -> tuple[Row, ...]:
        return compare([await self._side(job) for job in jobs])

    async def _side(self, job: Job) -> Side:
        made = await self.of(job)
        ran = job if job.cached_from is None else await self._jobs.get(job.cached_from)
        measured = await self._measure(ran.id, ran.attempt)
        return Side(
            job,
            await self._environments.of(ran.id, ran.attempt),
            settings(job.spec),
            all_parameters(parameters(job.spec), measured.parameters),
            measured.figures,
            made.metrics,
            made.files,
            None if job.cached_from else made.energy,
        )

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
        return await self.remove_left(job)

    async def remove_left(self, job: Job) -> tuple[str, ...]:
        """Removes the files that were left on the nodes. Returns what failed, in sentences."""
        attempts = {one.number: one.placement.nodes for one in await self._jobs.attempts(job.id)}
        nodes = dict.fromkeys(node for placed in attempts.values() for node in placed)
        problems = await asyncio.gather(*(self._drop(job, node, attempts) for node in nodes))
        return tuple(problem for problem in problems if problem is not None)

    async def _drop(self, job: Job, node: str, attempts: Mapping[int, Sequence[str]]) -> str | None:
        try:
            await self._collector.drop_kept(job, node, attempts)
        except UgroError as error:
            return f"results on {node} could not be removed: {error}"
        return None

    # --- looking -----------------------------------------------------------------------------------------------

    def _node(self, job: Job, attempt: int, node: str, *, is_first: bool, is_pending: bool) -> NodeResults:
        known = self._collector.outputs(job, attempt, node, is_first=is_first)
        arrived = [one for one in known if isinstance(one, Arrived)]
        found = _arrived(node, arrived)
        under_way = []
        for one, fetched in zip(known, self._collector.fetching(job, attempt, node), strict=True):
            if isinstance(one, Progress):
                under_way.append(one)
            elif isinstance(one, Arrived) and fetched is not None:  # what it had left; the rest is counted
                under_way.append(replace(fetched, files=fetched.missing_files, bytes=fetched.missing_bytes))
        is_missing = known[0] is None or isinstance(known[0], Progress)
        if is_missing or (is_pending and not isinstance(known[-1], Arrived)):
            state = self._state(job, attempt, node, is_pending=is_pending)
            found = replace(found, state=state if state is not ResultState.NONE or not arrived else found.state)
        elif under_way:
            found = replace(found, state=ResultState.COMING)
        return _with_progress(found, under_way)

    def _state(self, job: Job, attempt: int, node: str, *, is_pending: bool) -> ResultState:
        """Of a part of which nothing is recorded."""
        if attempt == job.attempt and job.state in _UNDER_WAY:
            return ResultState.LIVE
        status = self._watch.status(node, job.id, attempt)
        if status is not None and status.has_outputs:
            return ResultState.COMING
        if status is None and self._watch.silent_s(node):
            return ResultState.UNKNOWN
        if job.results_removed_at is not None:
            return ResultState.REMOVED
        return ResultState.COMING if is_pending else ResultState.NONE

    def _all(self, job: Job, attempt: int, nodes: Sequence[NodeResults], most_listed: int | None) -> JobResults:
        folder = self._folder / str(job.id)
        parts = tuple(self._parts(job, folder, attempt))
        files = [file for part in parts for file in _files(part)]
        return JobResults(
            job.id,
            attempt,
            str(folder),
            _together(job, nodes),
            len(files),
            sum(file.bytes for file in files),
            tuple(files[:most_listed]),
            tuple(nodes),
            parts,
            removed_at=job.results_removed_at,
        )

    def _steps(self, attempt: Path) -> StepTotals | None:
        """Cached by size and time of the file: clients that wait for results ask again and again."""
        path = attempt / "output" / _METRICS
        with contextlib.suppress(OSError), path.open("rb") as file:
            about = os.fstat(file.fileno())
            key = (str(path), about.st_size, about.st_mtime_ns)
            if key not in self._summed_up:
                while len(self._summed_up) >= _MOST_SUMMED_UP:
                    self._summed_up.pop(next(iter(self._summed_up)))
                self._summed_up[key] = read_totals(foreign.lines(file, most_bytes=_MOST_TOTALLED))
            return self._summed_up[key]
        return None

    def _parts(self, job: Job, folder: Path, attempt: int) -> Iterator[Part]:
        newest, checkpoints = attempt_folder(folder, attempt), job.spec.checkpoint.name
        if not caller.hides_values(job):  # it has the values of the job's variables, which are its user's
            is_theirs = (newest / "output" / CONFIG).exists()
            yield Part("job." + CONFIG if is_theirs else CONFIG, str(folder / CONFIG))
        yield Part("logs", str(newest / "logs"))
        yield Part("", str(newest / "output"))
        yield Part("nodes", str(newest / "nodes"))
        earlier = earlier_checkpoints(folder, attempt, checkpoints) if attempt == job.attempt else {}
        for name, path in earlier.items():
            yield Part(f"{checkpoints}/{shown(name)}", str(path))
        # The one that a retry would resume from: while the job runs, and of a folder of the user's.
        resume = self._collector.checkpoint(job.id) if job.spec.has_checkpoints else None
        if resume is not None and attempt == job.attempt:
            name = os.fsencode(resume.name)
            if name not in earlier and not os.path.lexists(newest / "output" / checkpoints / resume.name):
                yield Part(f"{checkpoints}/{resume.name}", resume.file or resume.path)


def _arrived(node: str, parts: Sequence[Arrived]) -> NodeResults:
    has_some = any(one.files or one.left_count or one.same for one in parts)
    return NodeResults(
        node,
        ResultState.HOME if has_some else ResultState.NONE,
        sum(one.files for one in parts),
        sum(one.bytes for one in parts),
        left=tuple(file for one in parts for file in one.left),
        left_count=sum(one.left_count for one in parts),
        unsendable=tuple(file for one in parts for file in one.unsendable),
        left_bytes=sum(one.left_bytes or sum(file.bytes for file in one.left) for one in parts),
    )


def _with_progress(found: NodeResults, under_way: Sequence[Progress]) -> NodeResults:
    """What was found and is not here yet, or why it does not come."""
    problem = next((one.problem for one in under_way if one.problem is not None), None)
    missing_files = sum(one.missing_files for one in under_way)
    missing_bytes = sum(one.missing_bytes for one in under_way)
    return replace(
        found,
        state=found.state if problem is None else ResultState.WAITING,
        files=found.files + sum(one.files for one in under_way) - missing_files,
        bytes=found.bytes + sum(one.bytes for one in under_way) - missing_bytes,
        missing_files=missing_files,
        missing_bytes=missing_bytes,
        problem=problem,
    )


def _left_before(folder: Path, attempt: int) -> tuple[int, ...]:
    return tuple(one for one in with_left(folder) if one < attempt)


def _is_named(patterns: Sequence[Glob[str]], name: bytes) -> bool:
    """By one of these patterns, or below a folder that is; without patterns, everything is."""
    text = shown(name)
    folders = (text[:at] for at, sign in enumerate(text) if sign == "/")
    return not patterns or any(pattern.fits(one) for one in (text, *folders) for pattern in patterns)


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
