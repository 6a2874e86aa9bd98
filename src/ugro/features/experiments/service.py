"""All jobs as experiments, kept in memory and updated with what has changed since the last call.

``rules.table`` sorts and filters them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ugro.features.experiments.model import Note, checked_tags, checked_text
from ugro.features.experiments.operations import ChangeJobNote, CompareJobs, FoundNote, GetJobNote, JobComparison
from ugro.features.experiments.store import NoteStore
from ugro.kernel.access.caller import shown, viewer
from ugro.kernel.access.model import Caller
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.service import JobService
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.moments import elapsed_s, unix_seconds
from ugro.kernel.telemetry.model import Experiment
from ugro.kernel.telemetry.rules import all_parameters, parameters
from ugro.kernel.telemetry.service import MonitoringService

MOST = 50_000  # older ones are not listed, but still have their own pages


class Experiments:
    def __init__(self, store: Store, monitoring: MonitoringService) -> None:
        self._store = store
        self._monitoring = monitoring
        self._all: dict[int, Experiment] = {}
        self._seq = 0
        self._grown = -1
        self._looking = asyncio.Lock()
        monitoring.on_removed.append(self._forget)

    async def all(self) -> list[Experiment]:
        """The current experiments, by job number."""
        async with self._looking:
            await self._take_changes()
            await self._take_figures()
            self._take_energy()
            hidden = await self._store.visibility.hidden_from(viewer())
            return [self._all[number] for number in sorted(self._all.keys() - hidden)]

    def _forget(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self._all.pop(job, None)

    async def _take_changes(self) -> None:
        changed = await self._store.notes.changed(self._seq, MOST)
        self._seq = changed.seq
        for job in changed.jobs:
            self._all[job.id] = _with_job(self._all.get(job.id), job)
        for note in changed.notes:
            if (known := self._all.get(note.job)) is not None:
                self._all[note.job] = replace(known, note=note.text, tags=note.tags)
        while len(self._all) > MOST:
            del self._all[min(self._all)]

    async def _take_figures(self) -> None:
        is_first = self._grown < 0
        # Counted before reading: curves that grow meanwhile are read again the next time.
        count, jobs = self._monitoring.grown_since(self._grown)
        chosen = None if is_first else jobs
        found = await self._monitoring.metrics.figures(chosen)
        written = await self._monitoring.metrics.parameters(chosen)
        for job in found.keys() | written.keys() if is_first else jobs:
            if (known := self._all.get(job)) is not None:
                given = all_parameters(known.parameters, written.get(job, {}))
                self._all[job] = replace(known, figures=found.get(job, {}), parameters=given)
        self._grown = count

    def _take_energy(self) -> None:
        """Of all that were measured: the price may have changed."""
        price = self._monitoring.energy.price()
        for job, joules in self._monitoring.energy.totals.items():
            if (known := self._all.get(job)) is not None:
                wh, cost = joules / 3600, price.of(joules)
                if (wh, cost) != (known.energy_wh, known.cost):
                    self._all[job] = replace(known, energy_wh=wh, cost=cost)


def _with_job(known: Experiment | None, job: Job) -> Experiment:
    started_s = unix_seconds(job.started_at) if job.started_at else None
    # By how long it ran: this machine's clock may have been set meanwhile.
    ended_s = started_s + elapsed_s(job.started, job.ended) if started_s and job.started and job.ended else None
    if known is not None:
        return replace(known, state=job.state, started_s=started_s, ended_s=ended_s)
    submitted_s = unix_seconds(job.submitted_at)
    given = parameters(job.spec)
    return Experiment(job.id, job.spec.name, job.user, job.state, submitted_s, started_s, ended_s, given)


# --- requests ---------------------------------------------------------------------------------------------------------


class ExperimentRequests:
    def __init__(self, jobs: JobService, notes: NoteStore, results: ResultService) -> None:
        self._jobs = jobs
        self._notes = notes
        self._results = results

    @answers(GetJobNote)
    async def note(self, asked: GetJobNote, caller: Caller) -> FoundNote:
        return FoundNote(await self._notes.get((await self._jobs.find(asked.word)).id))

    @answers(ChangeJobNote)
    async def change_note(self, asked: ChangeJobNote, caller: Caller) -> FoundNote:
        def changed(note: Note) -> Note:
            text = note.text if asked.text is None else checked_text(asked.text)
            tags = note.tags if asked.tags is None else asked.tags
            kept = [tag for tag in (*tags, *asked.add) if tag not in asked.remove]
            return replace(note, text=text, tags=checked_tags(kept))

        return FoundNote(await self._notes.change((await self._jobs.find(asked.word)).id, changed))

    @answers(CompareJobs)
    async def compare(self, asked: CompareJobs, caller: Caller) -> JobComparison:
        jobs = await self._jobs.find_different(asked.job)
        return JobComparison(tuple(jobs), await self._results.compare([shown(job) for job in jobs]))
