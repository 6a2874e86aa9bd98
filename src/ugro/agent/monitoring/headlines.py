"""The headline of a job: reads what ``policy.training`` needs, a few coarse curves and the end of a log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ugro.agent.artifacts.job_folder import rank_log
from ugro.core.energy import JobEnergy
from ugro.core.headline import DeviceUse, Headline, LossLine, Speed
from ugro.core.job import HOLDING_STATES, Job, JobState
from ugro.core.login import node_of
from ugro.core.metrics import main_loss
from ugro.core.node import Gpu, NodeReport
from ugro.core.support import clock
from ugro.core.support.moment import elapsed_s
from ugro.policy.experiments.parameters import parameters
from ugro.policy.training import headline as words
from ugro.policy.training.progress import EPOCH, TOLD, Known, Track, mean_seconds_per_step, progress, seconds_per_step
from ugro.telemetry.curves import Curve, KeySummary, Wanted
from ugro.telemetry.metricstore import MetricStore, job_owner

_BINS = 60
_TAIL_BYTES = 8192
MOST_IN_A_LIST = 20  # each reads some curves
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
                return os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace")
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
