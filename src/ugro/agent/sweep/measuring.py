"""What trials have measured: the values of their metric, from the same metric store as everything else."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from ugro.agent.jobs.results import ResultService
from ugro.agent.monitoring.service import MonitoringService
from ugro.agent.sweep.listening import Listening
from ugro.core.failure import Cause
from ugro.core.job import Job, JobState
from ugro.core.results import ResultState
from ugro.core.support import clock
from ugro.core.support.moment import elapsed_s
from ugro.core.sweep import Trial, TrialState
from ugro.policy.sweep.history import Series, joined, merged, score_of, thinned
from ugro.policy.sweep.spec import Metric
from ugro.store.jobs import JobStore
from ugro.telemetry.curves import Wanted
from ugro.telemetry.metricstore import job_owner

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
