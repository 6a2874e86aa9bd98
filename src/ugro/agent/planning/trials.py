"""Trials: the user's script as ordinary jobs that measure a few steps and end. Queue, devices and clean-up are a job's.

What a trial wrote is read when it has ended and its files are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ugro.agent.artifacts.job_folder import attempt_folder
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.service import JobService
from ugro.core.errors import UgroError
from ugro.core.failure import Cause
from ugro.core.job import (
    ALL_GPUS,
    ANY_GPUS,
    After,
    Checkpoint,
    Job,
    JobSpec,
    JobState,
    Resources,
    ResultRule,
    Retry,
    Share,
)
from ugro.core.results import ResultState
from ugro.core.training import Training, read
from ugro.store.trials import TrialStore

log = logging.getLogger(__name__)

VARIABLE = "UGRO_TRIAL"
KEY = "trial-"  # how the keys of their submissions begin
_START_S = 270.0  # imports, data and the model, before the first step
_WAIT_S = 60.0  # in all: for its devices, for a node that is out of reach, for an owner to leave
_STOP_S = 60.0  # beyond its time limit and the grace of a stop
_PRIORITY = 0  # the lowest: no job is stopped for a trial
_LOOKS, _LOOK_S = 300, 0.2
_MOVE_S = 2.0
_MOST_BYTES = 16 << 20
_AT_WORK = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})
_NOT_HERE = frozenset({ResultState.COMING, ResultState.LIVE, ResultState.WAITING})
_OUT_OF_MEMORY = frozenset({Cause.CUDA_OOM, Cause.OOM})

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """A trial to run."""

    spec: JobSpec
    shares: tuple[Share, ...]  # one, or all of a joint trial
    parts: int  # how many nodes may share a batch
    limit_s: float
    user: str
    candidates: tuple[Share, ...] = ()  # all nodes that are planned for

    @property
    def is_joint(self) -> bool:
        return len(self.shares) > 1


@dataclass(frozen=True, slots=True)
class Ran:
    job: Job
    training: Training
    ran_out_of_memory: bool

    @property
    def problem(self) -> str:
        """Why it ended, if not in good order."""
        return f"its trial {self.job.state}: {self.job.reason}"


class Late(UgroError):
    """The trial did not end in time, mostly because something else uses the node; the text says why."""


class Trials:
    def __init__(
        self,
        folder: Path,
        store: TrialStore,
        jobs: JobService,
        results: ResultService,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._store = store
        self._jobs = jobs
        self._results = results
        self._clock = clock

    async def end_left(self) -> None:
        """Those of an agent that was killed: nobody waits for what they measure."""
        for job in await self._store.jobs_under_way(KEY):
            await self._cancel(job)

    async def run(self, request: Request, say: Say) -> Ran:
        """Raises Late. If this is cancelled, so is the trial."""
        job = await self._submitted(request)
        try:
            job = await self._ended(job, say)
        finally:
            if not job.is_final:
                await asyncio.shield(self._cancel(job.id))
        say("reading what it measured")
        await self._collected(job)
        training = await asyncio.to_thread(self._read, job)
        details = await self._jobs.details(str(job.id))
        failure = details.attempts[-1].failure if details.attempts else None
        return Ran(job, training, failure is not None and failure.cause in _OUT_OF_MEMORY)

    async def _submitted(self, request: Request) -> Job:
        key = KEY + os.urandom(16).hex()
        try:
            return await self._jobs.submit_made(trial_spec(request), request.user, key)
        except asyncio.CancelledError:
            await asyncio.shield(self._withdraw(key))  # it may be recorded all the same
            raise

    async def _withdraw(self, key: str) -> None:
        if (job := await self._jobs.withdraw(key)) is not None:
            await self._cancel(job.id)

    async def _ended(self, job: Job, say: Say) -> Job:
        patience = _Patience(self._clock())
        while not job.is_final:
            async with contextlib.aclosing(self._jobs.moves(job.id, timeout_s=_MOVE_S)) as moves:
                async for [moved] in moves:
                    patience.count(job, self._clock())
                    job = moved
                    say(_progress(job))
            patience.count(job, self._clock())
            if not job.is_final and (problem := patience.problem(job)) is not None:
                raise Late(problem)
        return job

    async def _cancel(self, job: int) -> None:
        try:
            await self._jobs.cancel(str(job))
        except UgroError as error:  # it may have ended meanwhile
            log.info("trial %d cannot be cancelled: %s", job, error)

    async def _collected(self, job: Job) -> None:
        """Waits until its files are here; a node that is unreachable meanwhile has them still."""
        for _ in range(_LOOKS):
            if (await self._results.brief(job)).state not in _NOT_HERE:
                return
            await asyncio.sleep(_LOOK_S)

    def _read(self, job: Job) -> Training:
        if not job.attempt:
            return Training()
        path = attempt_folder(self._folder / str(job.id), job.attempt) / "output" / "metrics.jsonl"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return Training()
        with open(fd, "rb") as file:
            return read(file.read(_MOST_BYTES).split(b"\n"))


class _Patience:
    """How long a trial has waited and worked, in all its attempts."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._waited_s = 0.0
        self._worked_s = 0.0

    def count(self, job: Job, now_s: float) -> None:
        """It was in this state until now."""
        if job.state in _AT_WORK:
            self._worked_s += now_s - self._since_s
        else:
            self._waited_s += now_s - self._since_s
        self._since_s = now_s

    def problem(self, job: Job) -> str | None:
        """Why to wait no longer. The engine ends an attempt at its time limit, unless its node is out of reach."""
        if self._waited_s > _WAIT_S and job.state not in _AT_WORK:
            word = "busy" if job.state is JobState.QUEUED else "not available"
            return f"{word} for more than {_WAIT_S:g} s: {job.reason}"
        limit_s = (job.spec.time_limit_s or 0.0) + job.spec.stop.grace_s + _STOP_S
        return f"its trial took more than {limit_s:g} s: {job.reason}" if self._worked_s > limit_s else None


def trial_spec(request: Request) -> JobSpec:
    """The same script, code and variables; none of what would outlast it."""
    spec, count = request.spec, len(request.shares)
    kind = "joint" if request.is_joint else "solo"
    return replace(
        spec,
        name=f"trial-{spec.name}"[:64].rstrip("._-"),
        env=tuple(sorted({**dict(spec.env), VARIABLE: f"{kind}:{request.parts}:{request.limit_s:g}"}.items())),
        resources=replace(
            spec.resources,
            min_nodes=count,
            max_nodes=count,
            only=tuple(share.node for share in request.shares),
            gpus_per_node=_gpus(spec.resources, request.shares),
        ),
        time_limit_s=_START_S + request.limit_s,
        priority=_PRIORITY,
        is_preemptible=False,
        after=After(),
        retry=Retry(),
        checkpoint=Checkpoint(),
        outputs=(),
        results=ResultRule(checkpoints="none", workdir=False),
        is_cached=False,
        notify=(),
    )


def _gpus(wanted: Resources, shares: Sequence[Share]) -> int:
    """The same on every node, as for the training itself."""
    if wanted.gpus_per_node != ANY_GPUS:
        return wanted.gpus_per_node
    return ALL_GPUS if any(share.gpus for share in shares) else 0


def _progress(job: Job) -> str:
    if job.state is JobState.QUEUED:
        return f"waits: {job.reason}"
    return "measuring" if job.state is JobState.RUNNING else f"{job.state}: {job.reason}"
