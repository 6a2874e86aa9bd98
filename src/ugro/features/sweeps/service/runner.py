"""Drives one sweep: reads what its trials measured, records, then acts.

After a crash the next agent does what the rows say was begun.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ugro.features.sweeps.model import Sweep, SweepState, Trial, TrialState, trial_key
from ugro.features.sweeps.rules.decision import (
    Act,
    Decision,
    Series,
    View,
    decide,
    joined,
    merged,
    outcome,
    predecessor,
    score_of,
    thinned,
    to_prune,
)
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import Metric
from ugro.features.sweeps.service.creation import trial_job
from ugro.features.sweeps.service.listening import Listening
from ugro.features.sweeps.service.sampler import Chooser, UsedUp, worse_than_best
from ugro.features.sweeps.store import SweepStore
from ugro.kernel.files.model import ResultState
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import Cause, Ending, Job, JobSpec, JobState, Sharing
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.kernel.support.moments import elapsed_s
from ugro.kernel.support.process import point
from ugro.kernel.telemetry.curves import Wanted
from ugro.kernel.telemetry.metricstore import job_owner
from ugro.kernel.telemetry.service import MonitoringService

# --- measuring --------------------------------------------------------------------------------------------------------
# What trials have measured: the values of their metric, from the same metric store as everything else.


_OUT_OF_MEMORY = frozenset({Cause.CUDA_OOM, Cause.OOM})
# How long the files of an ended trial are waited for; its node may be away, and an agent that has just begun has not
# reached it yet.
_PATIENCE_S = {
    ResultState.COMING: 60.0,
    ResultState.LIVE: 60.0,
    ResultState.WAITING: 900.0,
    ResultState.UNKNOWN: 900.0,
}
_MOST_NAMED = 5


class Measuring:
    def __init__(
        self, jobs: JobStore, monitoring: MonitoringService, results: ResultService, listening: Listening
    ) -> None:
        self._jobs = jobs
        self._monitoring = monitoring
        self._results = results
        self.listening = listening
        self._stored: dict[int, Series] = {}  # by job, as it was last read
        self._heard: dict[int, int] = {}  # by job, how many of the values that were heard are looked at
        self._ended: dict[int, float] = {}  # by job, when its end was first seen
        self._read: dict[int, int] = {}  # by job, how much had grown when its values were read

    @property
    def is_waiting(self) -> bool:
        """For the files of a trial: no signal says that they are here."""
        return bool(self._ended)

    async def look(self, trial: Trial, job: Job, metric: Metric | None) -> Trial:
        """Of a trial that has not ended."""
        lasts_s = job.lasts_s(clock.now()) if job.started else None
        # Counted before reading: what grows meanwhile is read the next time.
        count, grown = self._monitoring.grown_since(self._read.get(job.id, -1))
        has_grown = job.id not in self._read or job.id in grown
        if has_grown:
            self._read[job.id] = count
            self._stored[job.id] = await self._points(job, metric)
        heard = self.listening.heard(job.id)
        known = sum(map(len, heard.values()))
        if metric is not None and (has_grown or known != self._heard.get(job.id, 0)):
            self._heard[job.id] = known
            trial = _with(trial, joined(self._stored[job.id], heard), metric)
        return replace(trial, took_s=lasts_s, gpus=_gpus(job))

    async def ended(self, trial: Trial, job: Job, metric: Metric | None) -> Trial | None:
        """What has become of it; None: its files are not all here yet."""
        if not _was_pruned(trial, job):
            if await self._is_coming(job):
                return None
            await self._monitoring.measured(job.cached_from or job.id, job.attempt or 1)  # reads what has just arrived
            trial = trial if metric is None else _with(trial, await self._points(job, metric), metric)
        took_s = elapsed_s(job.started, job.ended) if job.started and job.ended else 0.0
        end, reason = await self._end(trial, job, metric)
        history = thinned(trial.history, metric.sign if metric else 1)
        return replace(trial, state=end, reason=reason, took_s=took_s, gpus=_gpus(job), history=history)

    async def _is_coming(self, job: Job) -> bool:
        """What it has made is not all here yet."""
        since = self._ended.setdefault(job.id, time.monotonic())
        state = (await self._results.brief(job)).state if job.attempt or job.cached_from else None
        return state is not None and time.monotonic() - since < _PATIENCE_S.get(state, 0.0)

    def forget(self, job: int) -> None:
        """Its trial is over."""
        for known in (self._ended, self._read, self._stored, self._heard):
            known.pop(job, None)
        self.listening.forget(job)

    async def _points(self, job: Job, metric: Metric | None) -> Series:
        series: dict[tuple[int, int], list[tuple[int, float]]] = {}
        if metric is None:
            return series
        owner = job_owner(job.cached_from or job.id)
        for key, points in (await self._monitoring.metrics.points(Wanted((owner,), (metric.name,)))).items():
            series[key.attempt, key.rank] = list(zip(points.steps, points.values, strict=True))
        return series

    async def _end(self, trial: Trial, job: Job, metric: Metric | None) -> tuple[TrialState, str]:
        if job.state is JobState.SUCCEEDED:
            if metric is None or trial.history:
                return TrialState.COMPLETE, job.reason if job.cached_from else ""
            return TrialState.FAILED, await self._no_metric(job, metric)
        if job.state is JobState.CANCELLED:
            return trial.ending or TrialState.CANCELLED, trial.reason or job.reason
        attempts = await self._jobs.attempts(job.id)
        failure = attempts[-1].failure if attempts else None
        if failure is not None and failure.cause in _OUT_OF_MEMORY:
            return TrialState.INFEASIBLE, failure.reason
        return TrialState.FAILED, job.reason

    async def _no_metric(self, job: Job, metric: Metric) -> str:
        keys = await self._monitoring.job_keys([job.cached_from or job.id])
        names = list(dict.fromkeys(key.key for key in keys))
        named = ", ".join(names[:_MOST_NAMED])
        has = f"it logged: {named}" if names else f"it logged no metrics; {_how_to_log(metric)}"
        return f"job {job.id} ended without a finite value of {metric.name}; {has}"


def _how_to_log(metric: Metric) -> str:
    line = json.dumps({"step": 1, metric.name: 0.5})
    return f"write lines such as {line} to metrics.jsonl in its folder, or use run.log of ugro.train"


def _was_pruned(trial: Trial, job: Job) -> bool:
    """What it was judged by is known, and nothing else of it counts."""
    return job.state is JobState.CANCELLED and trial.ending is TrialState.PRUNED and bool(trial.history)


def _with(trial: Trial, series: Series, metric: Metric) -> Trial:
    points = merged(series)
    if not points:
        return trial
    best = score_of(points, metric)
    return replace(trial, history=points, last=points[-1].value, step=points[-1].step, best=best)


def _gpus(job: Job) -> int:
    return sum(len(share.gpus) for share in job.placement.shares) if job.placement else 0


# --- runner -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_AT_ONCE = 32  # trials that one look may submit
_PRUNED_GRACE_S = 2.0  # to tidy up; nobody needs the checkpoint of a trial that others have beaten
NOT_STARTED = (JobState.QUEUED, JobState.STARTING)


class Parts(Protocol):
    """What a runner works with."""

    @property
    def sweeps(self) -> SweepStore: ...
    @property
    def store(self) -> JobStore: ...
    @property
    def jobs(self) -> JobService: ...
    @property
    def measuring(self) -> Measuring: ...


class Runner:
    def __init__(self, parts: Parts, sweep: Sweep, trials: list[Trial], on_change: Callable[[], None]) -> None:
        self._parts = parts
        self.sweep = sweep
        self.spec = read(json.loads(sweep.document))
        self.trials = {trial.number: trial for trial in trials}
        self._base = decode(JobSpec, json.loads(sweep.spec))
        self._chooser = Chooser(sweep.id, self.spec, trials)
        self._found: dict[int, Job] = {}  # the jobs of open trials, by trial
        self._on_change = on_change
        self._compared: list[tuple[int, TrialState, int]] = []  # the values that Optuna has judged
        self.more_s = 0.0  # that it ran since its time was recorded

    @property
    def shown(self) -> list[Trial]:
        """As people see them: a trial whose job has not started does not run."""
        waits = {number for number, job in self._found.items() if job.state in NOT_STARTED}
        return [
            replace(trial, state=TrialState.PENDING) if trial.is_open and trial.number in waits else trial
            for trial in self.trials.values()
        ]

    @property
    def open(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.is_open]

    @property
    def _measured(self) -> list[tuple[int, TrialState, int]]:
        return [(trial.number, trial.state, len(trial.history)) for trial in self.trials.values() if trial.history]

    @property
    def _leaving(self) -> list[Job]:
        """The jobs of open trials that were asked to end, and have not yet."""
        return [job for job in self._found.values() if job.ending is Ending.CANCELLED and not job.is_final]

    @property
    def _as_known(self) -> list[Trial]:
        """For the sampler: a trial that is being pruned will have no more values."""
        is_pruned = TrialState.PRUNED
        return [
            replace(trial, state=is_pruned) if trial.is_open and trial.ending is is_pruned else trial
            for trial in self.trials.values()
        ]

    def _predecessor(self) -> int | None:
        """Of a trial that is submitted now and counts as open."""
        taken = {number for job in self._found.values() for number in job.spec.after.any}
        return predecessor(self.sweep.budget.parallel, len(self.open) - 1, [job.id for job in self._leaving], taken)

    def view(self) -> View:
        waiting = [job for job in self._found.values() if job.state in NOT_STARTED]
        pending = sum(trial.state is TrialState.PENDING for trial in self.trials.values())
        elapsed_s = self.sweep.elapsed_s + self.more_s
        trials, leaving = list(self.trials.values()), len(self._leaving)
        return View(self.spec, self.sweep.budget, trials, len(waiting) + pending, leaving, elapsed_s)

    def decision(self) -> Decision:
        return decide(self.view())

    async def step(self) -> None:
        """Raises UgroError if a job cannot be submitted or ended now."""
        # First those that have a job: what is submitted then may wait for one of them to end.
        for trial in sorted(self.open, key=lambda trial: trial.state is TrialState.PENDING):
            await self._adopt(trial)
            await self._look(self.trials[trial.number])
        if self.sweep.state is not SweepState.RUNNING:
            for trial in self.open:
                await self._end(trial, TrialState.STOPPED, "stopped with the sweep")
            return
        await self._prune()
        for _ in range(_AT_ONCE):
            if not await self._next():
                return

    def leave(self) -> None:
        """It is over."""

    async def _next(self) -> bool:
        """Whether there may be more to do at once."""
        decision = self.decision()
        if decision.act is Act.TRY:
            return await self._try_another()
        if decision.act in (Act.END, Act.STOP):
            await self._over(decision)
        return False

    async def _try_another(self) -> bool:
        number = max(self.trials, default=0) + 1
        try:
            chosen = await asyncio.to_thread(self._chooser.choose, self._as_known, number)
        except UsedUp:
            if not self.open:
                await self._over(Decision(Act.END, "no new point was found"))
            return False
        trial = await self._parts.sweeps.add(self.sweep.id, chosen.settings, chosen.asked, chosen.memory)
        point("trial.recorded")
        self._keep(trial)
        await self._submit(trial)
        return True

    async def _adopt(self, trial: Trial) -> None:
        """Submits what was recorded; the same key is the same job."""
        if trial.state is not TrialState.PENDING:
            return
        if self.sweep.state is SweepState.RUNNING:
            await self._submit(trial)
        elif (job := await self._parts.jobs.withdraw(trial_key(self.sweep.id, trial.number))) is not None:
            await self._put(replace(trial, state=TrialState.RUNNING, job=job.id))
        else:
            await self._put(replace(trial, state=TrialState.STOPPED, reason="stopped before it was submitted"))

    async def _submit(self, trial: Trial) -> None:
        name = f"{self.sweep.name[:50]}-{trial.number}"
        spec = await trial_job(self._base, name, trial.settings, self.spec.options, self._parts.jobs)
        if (most := self.sweep.budget.trials_per_gpu) > 1:
            spec = replace(spec, resources=replace(spec.resources, sharing=Sharing(f"sweep-{self.sweep.id}", most)))
        if (before := self._predecessor()) is not None:
            spec = replace(spec, after=replace(spec.after, any=(*spec.after.any, before)))
        job = await self._parts.jobs.submit_made(spec, self.sweep.user, trial_key(self.sweep.id, trial.number))
        point("trial.submitted")
        self._found[trial.number] = job
        await self._put(replace(trial, state=TrialState.RUNNING, job=job.id))
        point("trial.running")

    async def _look(self, trial: Trial) -> None:
        if trial.state is not TrialState.RUNNING or trial.job is None:
            return
        try:
            job = await self._parts.store.get(trial.job)
        except NotFound:
            await self._put(replace(trial, state=TrialState.FAILED, reason=f"job {trial.job} was removed"))
            return
        before = self._found.get(trial.number)
        self._found[trial.number] = job
        if not job.is_final:
            if before is None or before.state is not job.state:
                self._on_change()
            if self.spec.pruning is not None and self.spec.metric is not None:
                self._parts.measuring.listening.follow(job, self.spec.metric.name)
            seen = await self._parts.measuring.look(trial, job, self.spec.metric)
            if replace(seen, took_s=trial.took_s) != trial:
                self._on_change()
            self._keep(seen)  # not recorded: it is read again by the next agent
        elif (ended := await self._parts.measuring.ended(trial, job, self.spec.metric)) is not None:
            point("trial.ended")
            await self._put(ended)
            point("trial.closed")
            log.info("trial %d of sweep %s is %s", ended.number, self.sweep.name, ended.state)

    async def _prune(self) -> None:
        if self.spec.pruning is None or self.spec.metric is None:
            return
        for found in to_prune(self.spec.pruning, self.spec.metric, self.trials.values()):
            await self._end(self.trials[found.number], TrialState.PRUNED, found.reason)
        if self.spec.pruning.kind == "wilcoxon" and self._compared != (seen := self._measured):
            self._compared = seen
            worse = await asyncio.to_thread(worse_than_best, self.spec, list(self.trials.values()))
            for trial in worse:
                await self._end(trial, TrialState.PRUNED, f"worse than the best trial at {len(trial.history)} steps")

    async def _end(self, trial: Trial, ending: TrialState, reason: str) -> None:
        """Why is recorded first: after a crash its end is not taken for a person's."""
        job = self._found.get(trial.number)
        if trial.job is None or job is None or job.is_final or job.ending is not None:
            return
        if trial.ending is not ending:
            trial = replace(trial, ending=ending, reason=reason)
            await self._put(trial)
            point("trial.ending")
            await self._parts.store.note(str(ending), f"trial {trial.number}: {reason}", job=job)
        grace_s = _PRUNED_GRACE_S if ending is TrialState.PRUNED else None
        self._found[trial.number] = await self._parts.jobs.cancel(str(trial.job), grace_s=grace_s)

    async def _over(self, decision: Decision) -> None:
        state, reason = outcome(decision, list(self.trials.values()))
        await self._parts.sweeps.end(self.sweep.id, state, reason)
        point("sweep.over")
        self.sweep = replace(self.sweep, state=state, reason=reason)
        self._on_change()

    async def _put(self, trial: Trial) -> None:
        await self._parts.sweeps.put(self.sweep.id, trial)
        if not trial.is_open:
            self._found.pop(trial.number, None)
            if trial.job is not None:
                self._parts.measuring.forget(trial.job)
        self._keep(trial)
        self._on_change()

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self._chooser.note(trial)


def problem_of(error: UgroError) -> str:
    return f"waits: {error}"
