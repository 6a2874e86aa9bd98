"""Plans a launch: trials on each node alone, one on all of them together, and what every set of them should do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.features.planning.forecasts import Forecasts, Known
from ugro.features.planning.model import MOST_NODES, JointFailure, JointTrial, LaunchPlan, LeftOut, NodeTrial
from ugro.features.planning.rules import make_plan
from ugro.features.planning.rules_trials import About, joint_trial, model_size, node_trial, too_large
from ugro.features.planning.store import TrialStore
from ugro.kernel.files.model import ResultState
from ugro.kernel.files.results.job_folder import attempt_folder
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    ANY_GPUS,
    After,
    Cause,
    Checkpoint,
    Ending,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Placement,
    Resources,
    ResultRule,
    Retry,
    Share,
)
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import NotAllowed, UgroError, Unsatisfiable, UsageError
from ugro.kernel.telemetry.records import Training, read

# --- trials -----------------------------------------------------------------------------------------------------------
# Trials: the user's script as ordinary jobs that measure a few steps and end. Queue, devices and clean-up are a job's.
#
# What a trial wrote is read when it has ended and its files are here.


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


# --- service ----------------------------------------------------------------------------------------------------------


LIMIT_S = 30.0
_DOCS = "docs/planning.md"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """As a client sends it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    submit: Submit
    most_nodes: int | None = None
    is_fresh: bool = False  # measures again what is known
    limit_s: float = LIMIT_S  # of the steps of one trial


class PlanService:
    def __init__(self, jobs: JobService, forecasts: Forecasts, trials: Trials) -> None:
        self._jobs = jobs
        self._forecasts = forecasts
        self._trials = trials

    async def end_left(self) -> None:
        """When the agent begins: the trials of plans that nobody waits for any more."""
        await self._trials.end_left()

    async def plan(self, request: PlanRequest) -> AsyncGenerator[list[dict[str, Any]]]:
        """``{"progress"}`` repeatedly, then ``{"plan"}``; or ``{"needs"}``: variables that the client must send."""
        _check(request)
        spec = await self._jobs.read(request.submit)
        if isinstance(spec, Needs):
            yield [{"needs": spec.variables}]
            return
        await self._refuse(spec)
        placement = await self._candidates(spec, request.most_nodes)
        work = _Work(self, spec, placement, request)
        async with aclosing(work.steps()) as steps:
            async for progress in steps:
                yield [{"progress": progress}]
        assert work.plan is not None
        yield [{"plan": work.plan}]

    async def _refuse(self, spec: JobSpec) -> None:
        """What cannot be predicted."""
        if spec.launcher is Launcher.COMMAND:
            raise UsageError("only a training script can be planned", hint="ugro plan train.py --nodes 3")
        if spec.resources.any_of:
            raise UsageError("a job with any_of cannot be planned", hint="ask for one of the alternatives")
        if not await self._jobs.uses(spec, "ugro"):
            raise NotAllowed(
                f"{spec.argv[0]} does not use ugro.train, so its speed cannot be predicted",
                hint="five lines of a training loop change: docs/training.md",
            )

    async def _candidates(self, spec: JobSpec, most: int | None) -> Placement:
        wanted = spec.resources
        most = most or (wanted.max_nodes if wanted.max_nodes > 1 else MOST_NODES)
        least = replace(wanted, min_nodes=1, max_nodes=min(most, MOST_NODES))
        return await self._jobs.place_idle(replace(spec, resources=least))

    # --- for one plan -------------------------------------------------------------------------------------------

    async def known(self, spec: JobSpec, shares: Sequence[Share]) -> Known:
        return await self._forecasts.known(spec, shares)

    async def measure(self, request: Request, say: _Say) -> NodeTrial | JointTrial | LeftOut:
        """A trial that has measured nothing is left out, and says why."""
        name = request.shares[0].node
        try:
            ran = await self._trials.run(request, say)
        except Late as error:
            return LeftOut(name, str(error))
        about = About(name, self._forecasts.device(request.shares[0]), _now(), ran.job.id, ran.ran_out_of_memory)
        found = joint_trial(ran.training, about) if request.is_joint else node_trial(ran.training, about)
        if isinstance(found, str):
            why = _why(ran, found) + self._too_large(ran, request)
            if request.is_joint and ran.job.state is not JobState.CANCELLED:
                nodes = tuple(share.node for share in request.shares)
                failure = JointFailure(nodes, why, about.at, ran.job.id)
                await self._forecasts.keep(request.spec, request.shares, failure)
            return LeftOut(name, why, ran.job.id)
        await self._forecasts.keep(request.spec, request.shares, found)
        return found

    def _too_large(self, ran: Ran, request: Request) -> str:
        """What would help a training that ran out of memory, if it has come far enough to say how large it is."""
        model = ran.training.model
        size = model_size(model, ran.training.trial) if model is not None and ran.ran_out_of_memory else None
        devices = self._forecasts.devices(request.candidates)
        return f"; {too_large(size, devices)}" if size is not None and devices else ""

    async def conclude(self, spec: JobSpec, known: Known, cached: dict[str, bool], left: list[LeftOut]) -> LaunchPlan:
        plan = make_plan(spec.name, await self._forecasts.knowledge(spec, known), cached, left)
        shares = [share for name in known.trials if (share := self._forecasts.whole(name, spec.resources)) is not None]
        return replace(plan, memory=self._forecasts.needs(known.trials, shares))

    async def knows_links(self, nodes: Sequence[str]) -> bool:
        return len(await self._forecasts.links(nodes)) == len(nodes) * (len(nodes) - 1) // 2


class _Say:
    """The newest word about one trial."""

    def __init__(self, said: dict[str, str], name: str, news: ChangeSignal) -> None:
        self._said = said
        self._name = name
        self._news = news

    def __call__(self, text: str) -> None:
        if self._said.get(self._name) != text:
            self._said[self._name] = text
            self._news.notify()


class _Work:
    """One plan under way."""

    def __init__(self, service: PlanService, spec: JobSpec, placement: Placement, request: PlanRequest) -> None:
        self.plan: LaunchPlan | None = None
        self._service = service
        self._spec = spec
        self._shares = placement.shares
        self._request = request
        self._said: dict[str, str] = {}
        self._left: list[LeftOut] = []
        self._can_join = True

    async def steps(self) -> AsyncGenerator[str]:
        service, is_fresh = self._service, self._request.is_fresh
        known = Known({}, None) if is_fresh else await service.known(self._spec, self._shares)
        missing = [share for share in self._shares if share.node not in known.trials]
        solo = {share.node: self._trial((share,)) for share in missing}
        found: dict[str, NodeTrial | JointTrial | LeftOut] = {}
        async with aclosing(self._all(solo, found)) as measuring:
            async for progress in measuring:
                yield progress
        trials = {**known.trials, **{node: one for node, one in found.items() if isinstance(one, NodeTrial)}}
        measured = [share for share in self._shares if share.node in trials]
        self._left += [one for one in found.values() if isinstance(one, LeftOut)]
        if not measured:
            raise _nothing(self._left)
        kept = Known({}, None) if is_fresh else await service.known(self._spec, measured)
        joint, self._can_join = kept.joint, kept.can_join
        if joint is None and await self._wants_joint(measured):
            together: dict[str, NodeTrial | JointTrial | LeftOut] = {}
            request = {"together": self._trial(tuple(measured))}
            async with aclosing(self._all(request, together)) as measuring:
                async for progress in measuring:
                    yield progress
            joint = self._joint(together["together"])
        in_order = {share.node: trials[share.node] for share in measured}
        cached = {node: node in known.trials for node in in_order}
        everything = Known(in_order, joint, kept.others, self._can_join)
        self.plan = await service.conclude(self._spec, everything, cached, self._left)

    async def _wants_joint(self, measured: Sequence[Share]) -> bool:
        nodes = [share.node for share in measured]
        is_unsure = self._request.is_fresh or not self._can_join
        return len(nodes) > 1 and (is_unsure or not await self._service.knows_links(nodes))

    def _joint(self, found: NodeTrial | JointTrial | LeftOut) -> JointTrial | None:
        if isinstance(found, LeftOut):
            self._left.append(replace(found, node="all together"))
        if isinstance(found, LeftOut) and found.job is None:
            return None  # it was not tried: as much is known as before
        self._can_join = isinstance(found, JointTrial)
        return found if isinstance(found, JointTrial) else None

    def _trial(self, shares: tuple[Share, ...]) -> Request:
        parts = len(self._shares)
        return Request(self._spec, shares, parts, self._request.limit_s, self._request.submit.user, self._shares)

    async def _all(
        self, requests: dict[str, Request], found: dict[str, NodeTrial | JointTrial | LeftOut]
    ) -> AsyncGenerator[str]:
        """All at once; fills ``found``."""
        news = ChangeSignal()
        tasks = {
            name: asyncio.create_task(
                self._service.measure(request, _Say(self._said, name, news)), name=f"trial on {name}"
            )
            for name, request in requests.items()
        }
        for task in tasks.values():
            task.add_done_callback(lambda _: news.notify())
        try:
            while names := [name for name, task in tasks.items() if not task.done()]:
                seen = news.count
                yield self._progress(names)
                await news.wait(seen)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        found.update({name: task.result() for name, task in tasks.items()})

    def _progress(self, names: Sequence[str]) -> str:
        return " · ".join(f"{name}: {self._said.get(name, 'submitting')}" for name in names)


def _check(request: PlanRequest) -> None:
    if not 1 <= request.limit_s <= 600:
        raise UsageError("a trial takes 1 to 600 seconds", hint="--seconds 30")
    if request.most_nodes is not None and not 1 <= request.most_nodes <= MOST_NODES:
        raise UsageError(f"a plan compares 1 to {MOST_NODES} nodes", hint="--nodes 3")


def _why(ran: Ran, found: str) -> str:
    """A program that failed says more than what is missing because of that."""
    if ran.job.state is JobState.SUCCEEDED:
        return found
    return f"{ran.problem}; {found}" if ran.job.ending is Ending.TIME_LIMIT else ran.problem


def _nothing(left: Sequence[LeftOut]) -> Unsatisfiable:
    words = "; ".join(f"{one.node}: {one.reason}" for one in left)
    number = next((one.job for one in left if one.job is not None), None)
    hint = f"see: {_DOCS}" if number is None else f"what it printed: ugro logs {number}; what is needed: {_DOCS}"
    return Unsatisfiable(f"nothing could be measured: {words}", hint=hint)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
