"""Training profiles from collected records, and traces of single steps on request."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ugro.agent.artifacts.job_folder import attempt_folder
from ugro.agent.monitoring.energy import EnergyService
from ugro.agent.monitoring.metrics_tail import read_end
from ugro.agent.support.caller import visible
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotAllowed, NotFound
from ugro.core.job import Job, JobState
from ugro.core.profile import JobProfile, TraceFile, TraceRequest
from ugro.core.training import AttemptSteps, Training
from ugro.policy.training.energy import watts, with_energy
from ugro.policy.training.profile import WINDOW, alternatives, profile, window_s
from ugro.policy.training.verdict import before_launch
from ugro.store.jobs import JobStore

MOST_STEPS = 10_000
_METRICS = "metrics.jsonl"
_HISTORY = 150  # steps before the window, from which the model of a rank's speed is learned
_EARLIER_JOBS = 200
_HINT = "a script that uses ugro.train writes one: docs/training.md"
_TRACE = re.compile(r"rank_(\d{1,6})\.step_(\d{1,12})\.(json\.gz|txt)")
_LONGEST_PROBLEM = 500


@dataclass(frozen=True, slots=True)
class Launch:
    """A job to be started: on these nodes, or on that many."""

    name: str
    nodes: tuple[str, ...]
    least: int
    most: int
    before: int | None = None  # only jobs older than this one count

    def is_on(self, nodes: tuple[str, ...]) -> bool:
        return set(nodes) == set(self.nodes) if self.nodes else self.least <= len(nodes) <= self.most


class Profiling:
    def __init__(self, folder: Path, jobs: JobStore, watch: RunTracker, energy: EnergyService) -> None:
        self._folder = folder
        self._jobs = jobs
        self._watch = watch
        self._energy = energy

    async def of(self, asked: Job, attempt: int | None = None, steps: int | None = None) -> JobProfile:
        job, number = await self._attempt(asked, attempt)
        training = await asyncio.to_thread(self._read, job.id, number, steps or WINDOW)
        found = await asyncio.to_thread(profile, training, number, steps)
        if found is None:
            raise self._none(job, training)
        return await self._with_energy(job, found, training, steps)

    async def steps(self, asked: Job) -> tuple[AttemptSteps, ...]:
        """What was recorded of each step, by attempt; empty if its script records none."""
        job, newest = await self._attempt(asked, None)
        read = [await asyncio.to_thread(self._read, job.id, at, MOST_STEPS) for at in range(1, newest + 1)]
        return tuple(
            AttemptSteps(
                number,
                one.names(len(one.steps[-1].shares)),
                one.run.device if one.run else "",
                one.run.mode if one.run else "",
                one.model.parameters if one.model else 0,
                tuple(one.steps[-MOST_STEPS:]),
            )
            for number, one in enumerate(read, start=1)
            if one.steps
        )

    async def _with_energy(self, job: Job, found: JobProfile, training: Training, steps: int | None) -> JobProfile:
        window = window_s(training, steps)
        parts = await self._energy.parts(job, found.attempt) if window is not None else []
        if window is None or not any(part.samples for part in parts):
            return found
        others = await asyncio.to_thread(alternatives, found, training)
        powers = await asyncio.to_thread(watts, parts, *window)
        return with_energy(found, powers, others.without_s, others.whole_s)

    async def trace(self, job: Job, steps: int, key: str) -> TraceRequest:
        """Ranks check for requests at most once a second, and then record their next steps."""
        if job.state is not JobState.RUNNING or job.placement is None:
            raise NotAllowed(f"job {job.id} is {job.state}: only future steps of a running job can be traced")
        training = await asyncio.to_thread(self._read, job.id, job.attempt, 1)
        if training.run is None or not training.steps:
            raise self._none(job, training)
        await self._watch.runs(job.placement.nodes[0]).trace(job.id, job.attempt, steps, key)
        await self._jobs.note("trace", f"{steps} steps of each rank are to be traced", job=job)
        return TraceRequest(job.id, job.attempt, len(training.run.nodes), steps)

    async def traces(self, asked: Job, attempt: int | None = None) -> tuple[TraceFile, ...]:
        """The traces that have been collected."""
        job, number = await self._attempt(asked, attempt)
        first = next((one.placement.nodes[0] for one in await self._jobs.attempts(job.id) if one.number == number), "")
        folder = attempt_folder(self._folder / str(job.id), number)
        return tuple(sorted(await asyncio.to_thread(lambda: list(_traces(folder, first))), key=_in_order))

    async def advice(self, launch: Launch) -> str | None:
        """What the newest earlier job of that name on the same nodes shows about using all of them."""
        for job in visible(await self._jobs.newest(_EARLIER_JOBS)):
            is_earlier = launch.before is None or job.id < launch.before
            if not is_earlier or job.spec.name != launch.name or job.placement is None or not job.attempt:
                continue
            nodes = job.placement.node_names
            if not launch.is_on(nodes) or not all(map(self._watch.can_be_asked, nodes)):
                continue
            training = await asyncio.to_thread(self._read, job.id, job.attempt, WINDOW)
            found = await asyncio.to_thread(profile, training, job.attempt)
            if found is not None:
                return before_launch(found, job.id)
        return None

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _attempt(self, asked: Job, attempt: int | None) -> tuple[Job, int]:
        job = asked if asked.cached_from is None else await self._jobs.get(asked.cached_from)
        if attempt is not None and attempt > job.attempt:
            raise NotFound(f"job {job.id} has no attempt {attempt}", hint=f"it has {job.attempt}")
        return job, attempt or job.attempt

    def _read(self, job: int, attempt: int, steps: int) -> Training:
        with contextlib.suppress(OSError):
            return read_end(self._metrics(job, attempt), steps + _HISTORY)
        return Training()

    def _metrics(self, job: int, attempt: int) -> Path:
        return attempt_folder(self._folder / str(job), attempt) / "output" / _METRICS

    def _none(self, job: Job, training: Training) -> NotFound:
        if job.results_removed_at is not None:
            return NotFound(f"the results of job {job.id} were removed, and its profile with them")
        if training.run is not None and not job.is_final:
            hint = f"wait for it: ugro profile {job.id} --watch"
            return NotFound(f"job {job.id} has reported no steps yet", hint=hint)
        is_early = job.state in (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
        so_far = " yet" if is_early else ""
        return NotFound(f"job {job.id} has written no profile of its steps{so_far}", hint=_HINT)


def _traces(attempt: Path, first: str) -> Iterator[TraceFile]:
    places = [(first, attempt / "output")]
    with contextlib.suppress(OSError):
        places += [(path.name, path) for path in (attempt / "nodes").iterdir()]
    for node, place in places:
        with contextlib.suppress(OSError):
            for path in (place / "traces").iterdir():
                if (found := _TRACE.fullmatch(path.name)) is not None and path.is_file():
                    problem = _problem(path) if found[3] == "txt" else None
                    yield TraceFile(int(found[1]), int(found[2]), node, str(path), path.stat().st_size, problem)


def _problem(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_LONGEST_PROBLEM).decode("utf-8", "replace").strip()


def _in_order(trace: TraceFile) -> tuple[int, int]:
    return trace.step, trace.rank
