"""Energy, headline and profile of a job: reads a few coarse curves and the end of a log, and asks the rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ugro.features.training import operations
from ugro.features.training import rules_headline as words
from ugro.features.training.model import (
    DeviceUse,
    EnergySample,
    Headline,
    JobEnergy,
    JobProfile,
    LossLine,
    Speed,
    TraceFile,
    TraceRequest,
    read_samples,
)
from ugro.features.training.rules_energy import EpochMark, NodePart, Price, epoch_marks, job_energy, watts, with_energy
from ugro.features.training.rules_headline import (
    EPOCH,
    TOLD,
    Known,
    Track,
    mean_seconds_per_step,
    progress,
    seconds_per_step,
)
from ugro.features.training.rules_profile import WINDOW, alternatives, before_launch, profile, window_s
from ugro.kernel.access.caller import visible
from ugro.kernel.access.model import Caller, node_of
from ugro.kernel.files.results.job_folder import ENERGY, attempt_folder, energy_file, rank_log
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import HOLDING_STATES, Attempt, Job, JobState
from ugro.kernel.jobs.records import Plan
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.model import Gpu, NodeReport
from ugro.kernel.operations.request import answers
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import NotAllowed, NotFound
from ugro.kernel.support.moments import elapsed_s
from ugro.kernel.telemetry.curves import Curve, Wanted
from ugro.kernel.telemetry.metricstore import MetricStore, job_owner
from ugro.kernel.telemetry.model import KeySummary, main_loss
from ugro.kernel.telemetry.records import AttemptSteps, Training, document, read
from ugro.kernel.telemetry.rules import parameters

# --- energy -----------------------------------------------------------------------------------------------------------
# What jobs used and cost: from the collected files of their meters, which stay as long as their logs.


_MOST_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
_EPOCHS = ("profile/epoch", "epoch")  # of ugro.train; of other libraries
_MOST_RECORDS = 500_000
_EVERY_S = 1.0
_JOBS_AT_ONCE = 500


class EnergyService:
    def __init__(
        self,
        folder: Path,
        jobs: JobStore,
        metrics: MetricStore,
        price: Callable[[], Price],
        on_change: Callable[[Iterable[int]], None] = lambda jobs: None,
    ) -> None:
        """``on_change``: the totals of these jobs are new."""
        self._folder = folder
        self._jobs = jobs
        self._metrics = metrics
        self.price = price
        self._on_change = on_change
        self.totals: dict[int, float] = {}  # joules, by job of which something was measured
        self._changed: set[int] = set()

    async def of(self, job: Job, attempt: int | None = None) -> JobEnergy | None:
        """All of it, of the newest attempt or that one; None if nothing was measured."""
        number = attempt or job.attempt
        parts = await self.parts(job, number)
        marks = await self._marks(job.id, number) if any(part.samples for part in parts) else []
        return await self._energy(job, number, parts, marks)

    async def brief(self, job: Job) -> JobEnergy | None:
        """The same without epochs, from the end of each file."""
        return await self._energy(job, job.attempt, await self.parts(job, job.attempt, _TAIL_BYTES), [])

    async def parts(self, job: Job, attempt: int, most_bytes: int = _MOST_BYTES) -> list[NodePart]:
        tried = next((one for one in await self._jobs.attempts(job.id) if one.number == attempt), None)
        if tried is None or job.cached_from is not None:
            return []
        ranks = _ranks(await self._jobs.planned(job.id, attempt), tried)
        folder = self._folder / str(job.id)
        read = await asyncio.to_thread(
            lambda: {node: _read(energy_file(folder, attempt, node), most_bytes) for node in tried.placement.nodes}
        )
        # By the names that ranks have for their nodes: energy belongs to devices, not to a login.
        return [
            NodePart(node_of(one.node), ranks[one.node], one.gpus, read[one.node]) for one in tried.placement.shares
        ]

    async def _energy(
        self, job: Job, attempt: int, parts: Sequence[NodePart], marks: Sequence[EpochMark]
    ) -> JobEnergy | None:
        others_j = await asyncio.to_thread(_total, self._folder / str(job.id), attempt) if job.attempt > 1 else 0.0
        return await asyncio.to_thread(job_energy, attempt, parts, others_j, self.price(), marks)

    async def _marks(self, job: int, attempt: int) -> list[EpochMark]:
        wanted = Wanted((job_owner(job),), _EPOCHS, attempt)
        keys = [one for one in await self._metrics.keys(wanted) if one.count <= _MOST_RECORDS]
        chosen = min(keys, key=lambda one: (_EPOCHS.index(one.key), one.rank), default=None)
        if chosen is None:
            return []
        found = await self._metrics.points(Wanted(wanted.owners, (chosen.key,), attempt, chosen.rank))
        points = next(iter(found.values()))
        return await asyncio.to_thread(epoch_marks, [time_ms / 1000 for time_ms in points.times_ms], points.values)

    # --- of all jobs ---------------------------------------------------------------------------------------------

    def note_change(self, job: int) -> None:
        self._changed.add(job)

    def forget(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            self._changed.discard(job)
            self.totals.pop(job, None)

    async def run(self) -> None:
        """Keeps the totals. Nobody waits for them: at first there may be thousands of files to read."""
        self._changed |= await asyncio.to_thread(_jobs_in, self._folder)
        while True:
            changed = list(self._changed)[:_JOBS_AT_ONCE]
            self._changed.difference_update(changed)
            found = await asyncio.to_thread(_totals, self._folder, changed)
            if found:
                self.totals |= found
                self._on_change(found)
                await self._jobs.usage.note_energy(found)
            await asyncio.sleep(0 if self._changed else _EVERY_S)


def _ranks(plan: Plan | None, tried: Attempt) -> dict[str, tuple[int, ...]]:
    """By node. Without a plan, each node has one."""
    if plan is None:
        return {node: (number,) for number, node in enumerate(tried.placement.nodes)}
    planned = {part.node: tuple(rank.rank for rank in part.ranks) for part in plan.nodes}
    return {node: planned.get(node, ()) for node in tried.placement.nodes}


def _read(path: Path, most_bytes: int) -> list[EnergySample]:
    """Of the end of the file; a line that begins before is skipped. Nothing if there is no file."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            begin = max(0, os.fstat(descriptor).st_size - most_bytes)
            lines = os.pread(descriptor, most_bytes, begin).split(b"\n")
        finally:
            os.close(descriptor)
        return read_samples(lines[1:] if begin else lines)
    return []


def _total(job: Path, without: int = 0) -> float:
    """Of all attempts but one, in joules."""
    joules = 0.0
    for path in job.glob(f"attempt_*/{ENERGY}/*.jsonl"):
        samples = _read(path, _TAIL_BYTES) if path.parent.parent.name != f"attempt_{without}" else []
        joules += samples[-1].joules if samples else 0.0
    return joules


def _totals(folder: Path, jobs: Iterable[int]) -> dict[int, float]:
    found = {job: _total(folder / str(job)) for job in jobs}
    return {job: joules for job, joules in found.items() if joules}


def _jobs_in(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(entry.name) for entry in os.scandir(folder) if entry.name.isdigit()}
    return set()


# --- headlines --------------------------------------------------------------------------------------------------------


_BINS = 60
_HEADLINES_TAIL_BYTES = 8192
MOST_IN_A_LIST = 20  # each reads some curves
_MOST_HEADLINES = 50
_MOST_RANKS = 64  # that the share of computing is taken from
Reports = Callable[[], Mapping[str, NodeReport]]
Energy = Callable[[Job], Awaitable[JobEnergy | None]]


class Headlines:
    def __init__(self, folder: Path, metrics: MetricStore, reports: Reports, energy: Energy) -> None:
        self._folder = folder
        self._metrics = metrics
        self._reports = reports
        self._energy = energy

    async def of(self, job: Job) -> Headline:
        owner = job_owner(job.cached_from or job.id)
        attempt = job.attempt if job.cached_from is None else None
        keys = await self._metrics.keys(Wanted((owner,), attempt=attempt))
        seen = _Seen(keys)
        curves = await self._curves(owner, attempt, seen)
        made = Headline(
            job.id,
            job.attempt,
            job.is_final,
            job.lasts_s(clock.now()) if job.started_at is not None else None,
            "",
            progress(await self._known(job, seen, curves)),
            _loss(seen, curves),
            _speed(seen, curves, job),
            self._gpus(job) or _computing(curves, is_final=job.is_final),
            await self._energy(job),
        )
        return replace(made, words=words.in_one_line(made))

    async def words(self, jobs: Sequence[Job]) -> dict[int, str]:
        """By job, for a list; only of the first ones."""
        return {job.id: (await self.of(job)).words for job in jobs[:MOST_IN_A_LIST]}

    async def _curves(self, owner: str, attempt: int | None, seen: _Seen) -> dict[str, Curve]:
        wanted = [name for name in (seen.step, seen.loss, seen.speed, EPOCH) if name is not None]
        if seen.step == words.OWN_STEP:
            wanted += [words.OWN_SAMPLES, *seen.parts_of_ranks()]
        found = await self._metrics.curves(Wanted((owner,), tuple(wanted), attempt, seen.rank, bins=_BINS))
        return {curve.key: curve for curve in found}  # of several attempts, the newest

    async def _known(self, job: Job, seen: _Seen, curves: Mapping[str, Curve]) -> Known:
        is_over = job.state not in HOLDING_STATES  # or waits for its next attempt
        tail = "" if is_over else await asyncio.to_thread(self._log_tail, job)
        return Known(
            time.time() + self._clock_offset_s(job),
            _steps(seen, curves),
            seen.step == words.OWN_STEP,
            _epochs(curves.get(EPOCH)),
            {name: value for name in TOLD if (value := seen.last_value(name)) is not None},
            parameters(job.spec),
            tail,
            is_over,
            job.state is JobState.SUCCEEDED,
            _limit_left_s(job),
        )

    def _log_tail(self, job: Job) -> str:
        with contextlib.suppress(OSError):
            descriptor = os.open(rank_log(self._folder / str(job.id), job.attempt, 0), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                tail = os.pread(descriptor, _HEADLINES_TAIL_BYTES, max(0, size - _HEADLINES_TAIL_BYTES))
                return tail.decode("utf-8", "replace")
            finally:
                os.close(descriptor)
        return ""

    def _clock_offset_s(self, job: Job) -> float:
        """Of the node whose times the metrics have. A clock that is off is no training that stands still."""
        report = self._reports().get(job.placement.node_names[0]) if job.placement else None
        return (report.link.clock_offset_s if report is not None else None) or 0.0

    def _gpus(self, job: Job) -> DeviceUse | None:
        """What the nodes report now; of an ended job it says nothing."""
        if job.state is not JobState.RUNNING or job.placement is None:
            return None
        reports = self._reports()
        found: list[Gpu] = []
        for share in job.placement.shares:
            report = reports.get(node_of(share.node))
            facts = report.facts if report is not None else None
            found += [gpu for gpu in facts.gpus if gpu.index in share.gpus] if facts is not None else []
        return words.gpu_use(found)


class TrainingLooks:
    """Answers what is asked about jobs while they run."""

    def __init__(self, jobs: JobService, headlines: Headlines, energy: EnergyService) -> None:
        self._jobs = jobs
        self._headlines = headlines
        self._energy = energy

    @answers(operations.GetJobHeadline)
    async def headline(self, asked: operations.GetJobHeadline, caller: Caller) -> operations.FoundHeadline:
        return operations.FoundHeadline(await self._headlines.of(await self._jobs.find(asked.word)))

    @answers(operations.ListHeadlines)
    async def headlines(self, asked: operations.ListHeadlines, caller: Caller) -> operations.RunningHeadlines:
        running = await self._jobs.page(Listed(states=(JobState.RUNNING,), limit=_MOST_HEADLINES))
        return operations.RunningHeadlines(tuple([await self._headlines.of(job) for job in running]))

    @answers(operations.GetJobEnergy)
    async def energy(self, asked: operations.GetJobEnergy, caller: Caller) -> operations.FoundEnergy:
        return operations.FoundEnergy(await self._energy.of(await self._jobs.find(asked.word)))


class _Seen:
    """Which metrics the job has, and which of them say what. All of one rank: mostly only rank 0 logs."""

    def __init__(self, keys: Sequence[KeySummary]) -> None:
        newest = max((one.attempt for one in keys), default=0)
        current = [one for one in keys if one.attempt == newest]
        self.rank = min((one.rank for one in current), default=0)
        self._by_key = {one.key: one for one in current if one.rank == self.rank}
        self.step = words.step_name([(one.key, one.count) for one in self._by_key.values()])
        self.loss = main_loss(self._by_key)
        self.speed = next((name for name in words.SPEEDS if name in self._by_key), None)

    def get(self, name: str | None) -> KeySummary | None:
        return None if name is None else self._by_key.get(name)

    def last_value(self, name: str | None) -> float | None:
        found = self.get(name)
        return None if found is None else found.last_value

    def parts_of_ranks(self) -> list[str]:
        """A rank's own time and its waiting for data."""
        names = [f"profile/{part}_s/{rank}" for rank in range(_MOST_RANKS) for part in ("own", "data")]
        return [name for name in names if name in self._by_key]


def _steps(seen: _Seen, curves: Mapping[str, Curve]) -> Track | None:
    summary, curve = seen.get(seen.step), curves.get(seen.step or "")
    if summary is None or curve is None:
        return None
    # A bin begins at its first point; the last point of all ends the track.
    steps, times = [*curve.steps, summary.last_step], [*curve.times, summary.last_time]
    if len(curve.steps) and curve.steps[-1] == summary.last_step:
        steps, times = steps[:-1], times[:-1]
    return Track(steps, times, count=summary.count)


def _epochs(curve: Curve | None) -> Track | None:
    # The largest of a bin: a mean of whole epochs need not be whole.
    return None if curve is None else Track(curve.steps, curve.times, curve.highs, curve.count)


def _loss(seen: _Seen, curves: Mapping[str, Curve]) -> LossLine | None:
    curve = curves.get(seen.loss or "")
    if curve is None:
        return None
    best = min((low for low in curve.lows if low is not None), default=None)
    return replace(words.loss_line(curve.key, curve.steps, curve.means, seen.last_value(curve.key)), best=best)


def _ran_s(job: Job) -> float:
    """How long its attempt has run, or ran."""
    return elapsed_s(job.attempt_started, job.ended or clock.now()) if job.attempt_started is not None else 0.0


def _limit_left_s(job: Job) -> float | None:
    if job.spec.time_limit_s is None or job.state is not JobState.RUNNING:
        return None
    return job.spec.time_limit_s - _ran_s(job)


def _speed(seen: _Seen, curves: Mapping[str, Curve], job: Job) -> Speed | None:
    is_final = job.is_final
    samples, seconds = curves.get(words.OWN_SAMPLES), curves.get(words.OWN_STEP)
    if samples is not None and seconds is not None:
        return words.speed_of(samples.means, seconds.means, is_final=is_final)
    if seen.speed is not None and (logged := curves.get(seen.speed)) is not None:
        return words.logged_speed(seen.speed, logged.means, is_final=is_final)
    track = _steps(seen, curves)
    pace_s = seconds_per_step(track) if track is not None else None
    if pace_s is None and track is not None and is_final:
        pace_s = mean_seconds_per_step(track, _ran_s(job))
    return Speed(1 / pace_s, "steps/s") if pace_s else None


def _computing(curves: Mapping[str, Curve], *, is_final: bool) -> DeviceUse | None:
    step = curves.get(words.OWN_STEP)
    own, data = (
        [curve.means for key, curve in curves.items() if key.startswith(f"profile/{part}_s/")]
        for part in ("own", "data")
    )
    return None if step is None else words.computing(step.means, own, data, is_final=is_final)


# --- metrics tail -----------------------------------------------------------------------------------------------------
# Reads the newest records of a training's metrics file of any size: its end, and a little of its beginning.


_BLOCK = 1 << 20
_METRICS_TAIL_MOST_BYTES = 16 << 20
_HEAD_BYTES = 64 << 10
_STEP = b'"profile"'
_OF_THE_BEGINNING = ("run", "model", "plan")


def read_end(path: Path, steps: int, *, block: int = _BLOCK, most_bytes: int = _METRICS_TAIL_MOST_BYTES) -> Training:
    """With that many of the newest steps, as far as they are in the last 16 MiB. Blocks; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end = os.fstat(fd).st_size
        begin, tail = _tail(fd, end, steps, block, most_bytes)
        head = os.pread(fd, min(_HEAD_BYTES, begin), 0)
    finally:
        os.close(fd)
    lines = tail.split(b"\n")
    return read([*_beginning(head), *(lines[1:] if begin else lines)])


def _tail(fd: int, end: int, steps: int, block: int, most_bytes: int) -> tuple[int, bytes]:
    blocks: list[bytes] = []
    begin, found = end, 0
    while begin > 0 and found <= steps and end - begin < most_bytes:
        size = min(block, begin)
        begin -= size
        blocks.append(os.pread(fd, size, begin))
        found += blocks[-1].count(_STEP)
    return begin, b"".join(reversed(blocks))


def _beginning(head: bytes) -> Iterator[bytes]:
    """The description of the ranks is written once. The last line may be incomplete."""
    for line in head.split(b"\n")[:-1]:
        record = document(line)
        if record is not None and record.get("kind") in _OF_THE_BEGINNING:
            yield line


# --- profiling --------------------------------------------------------------------------------------------------------
# Training profiles from collected records, and traces of single steps on request.


_METRICS = "metrics.jsonl"
_HISTORY = 150  # steps before the window, from which the model of a rank's speed is learned
_EARLIER_JOBS = 200
_HINT = "a script that uses ugro.train writes one: docs/training.md"
_TRACE = re.compile(r"rank_(\d{1,6})\.step_(\d{1,12})\.(json\.gz|txt)")
_LONGEST_PROBLEM = 500


class Profiling:
    def __init__(
        self, folder: Path, store: JobStore, jobs: JobService, watch: RunTracker, energy: EnergyService
    ) -> None:
        self._folder = folder
        self._store = store
        self._jobs = jobs
        self._watch = watch
        self._energy = energy

    @answers(operations.GetJobProfile)
    async def profile_of(self, asked: operations.GetJobProfile, caller: Caller) -> operations.FoundProfile:
        job = await self._jobs.find(asked.word)
        return operations.FoundProfile(job, await self.of(job, asked.attempt, asked.steps))

    async def of(self, asked: Job, attempt: int | None = None, steps: int | None = None) -> JobProfile:
        job, number = await self._attempt(asked, attempt)
        training = await asyncio.to_thread(self._read, job.id, number, steps or WINDOW)
        found = await asyncio.to_thread(profile, training, number, steps)
        if found is None:
            raise self._none(job, training)
        return await self._with_energy(job, found, training, steps)

    @answers(operations.GetJobSteps)
    async def steps(self, asked: operations.GetJobSteps, caller: Caller) -> operations.FoundSteps:
        found = await self._jobs.find(asked.word)
        job, newest = await self._attempt(found, None)
        read = [await asyncio.to_thread(self._read, job.id, at, operations.MOST_STEPS) for at in range(1, newest + 1)]
        attempts = tuple(
            AttemptSteps(
                number,
                one.names(len(one.steps[-1].shares)),
                one.run.device if one.run else "",
                one.run.mode if one.run else "",
                one.model.parameters if one.model else 0,
                tuple(one.steps[-operations.MOST_STEPS:]),
            )
            for number, one in enumerate(read, start=1)
            if one.steps
        )
        return operations.FoundSteps(found, attempts)

    async def _with_energy(self, job: Job, found: JobProfile, training: Training, steps: int | None) -> JobProfile:
        window = window_s(training, steps)
        parts = await self._energy.parts(job, found.attempt) if window is not None else []
        if window is None or not any(part.samples for part in parts):
            return found
        others = await asyncio.to_thread(alternatives, found, training)
        powers = await asyncio.to_thread(watts, parts, *window)
        return with_energy(found, powers, others.without_s, others.whole_s)

    @answers(operations.TraceJob)
    async def trace(self, asked: operations.TraceJob, caller: Caller) -> TraceRequest:
        """Ranks check for requests at most once a second, and then record their next steps."""
        job, steps = await self._jobs.find(asked.word), asked.steps
        if job.state is not JobState.RUNNING or job.placement is None:
            raise NotAllowed(f"job {job.id} is {job.state}: only future steps of a running job can be traced")
        training = await asyncio.to_thread(self._read, job.id, job.attempt, 1)
        if training.run is None or not training.steps:
            raise self._none(job, training)
        await self._watch.runs(job.placement.nodes[0]).trace(job.id, job.attempt, steps, asked.key)
        await self._store.note("trace", f"{steps} steps of each rank are to be traced", job=job)
        return TraceRequest(job.id, job.attempt, len(training.run.nodes), steps)

    @answers(operations.ListJobTraces)
    async def traces(self, asked: operations.ListJobTraces, caller: Caller) -> operations.FoundTraces:
        found = await self._jobs.find(asked.word)
        job, number = await self._attempt(found, asked.attempt)
        first = next((one.placement.nodes[0] for one in await self._store.attempts(job.id) if one.number == number), "")
        folder = attempt_folder(self._folder / str(job.id), number)
        traces = await asyncio.to_thread(lambda: list(_traces(folder, first)))
        return operations.FoundTraces(found, tuple(sorted(traces, key=_in_order)))

    @answers(operations.GetAdvice)
    async def advice(self, asked: operations.GetAdvice, caller: Caller) -> operations.FoundAdvice:
        note = await self._jobs.import_note(asked.before) if asked.before is not None else None
        return operations.FoundAdvice(note or await self._earlier(asked))

    async def _earlier(self, asked: operations.GetAdvice) -> str | None:
        """What the newest earlier job of that name on the same nodes shows about using all of them."""
        for job in visible(await self._store.newest(_EARLIER_JOBS)):
            is_earlier = asked.before is None or job.id < asked.before
            if not is_earlier or job.spec.name != asked.name or job.placement is None or not job.attempt:
                continue
            nodes = job.placement.node_names
            if not asked.is_on(nodes) or not all(map(self._watch.can_be_asked, nodes)):
                continue
            training = await asyncio.to_thread(self._read, job.id, job.attempt, WINDOW)
            found = await asyncio.to_thread(profile, training, job.attempt)
            if found is not None:
                return before_launch(found, job.id)
        return None

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _attempt(self, asked: Job, attempt: int | None) -> tuple[Job, int]:
        job = asked if asked.cached_from is None else await self._store.get(asked.cached_from)
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
