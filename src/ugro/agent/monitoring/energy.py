"""What jobs used and cost: from the collected files of their meters, which stay as long as their logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ugro.agent.artifacts.job_folder import ENERGY, energy_file
from ugro.core.energy import EnergySample, JobEnergy, read_samples
from ugro.core.job import Attempt, Job
from ugro.core.login import node_of
from ugro.core.plan import Plan
from ugro.policy.training.energy import EpochMark, NodePart, Price, epoch_marks, job_energy
from ugro.store.jobs import JobStore
from ugro.telemetry.curves import Wanted
from ugro.telemetry.metricstore import MetricStore, job_owner

_MOST_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
_EPOCHS = ("profile/epoch", "epoch")  # of ugro.train; of other libraries
_MOST_RECORDS = 500_000
_EVERY_S = 1.0
_JOBS_AT_ONCE = 500


class EnergyService:
    def __init__(self, folder: Path, jobs: JobStore, metrics: MetricStore, price: Callable[[], Price]) -> None:
        self._folder = folder
        self._jobs = jobs
        self._metrics = metrics
        self.price = price
        self.on_change: Callable[[Iterable[int]], None] = lambda jobs: None  # the totals of these are new
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
                self.on_change(found)
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
