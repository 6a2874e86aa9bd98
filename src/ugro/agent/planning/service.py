"""Plans a launch: trials on each node alone, one on all of them together, and what every set of them should do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.agent.jobs.forecasts import Forecasts, Known
from ugro.agent.jobs.service import JobService
from ugro.agent.jobs.submission import Needs, Submit
from ugro.agent.planning.trials import Late, Ran, Request, Trials
from ugro.core.errors import NotAllowed, Unsatisfiable, UsageError
from ugro.core.job import Ending, JobSpec, JobState, Launcher, Placement, Share
from ugro.core.planning import MOST_NODES, JointFailure, JointTrial, LaunchPlan, LeftOut, NodeTrial
from ugro.policy.planning.memory import too_large
from ugro.policy.planning.plan import make_plan
from ugro.policy.planning.reading import About, joint_trial, model_size, node_trial

LIMIT_S = 30.0
_LOOK_S = 0.3
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

    def __init__(self, said: dict[str, str], name: str) -> None:
        self._said = said
        self._name = name

    def __call__(self, text: str) -> None:
        self._said[self._name] = text


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
        tasks = {
            name: asyncio.create_task(
                self._service.measure(request, _Say(self._said, name)), name=f"trial on {name}"
            )
            for name, request in requests.items()
        }
        try:
            while pending := [task for task in tasks.values() if not task.done()]:
                yield self._progress([name for name, task in tasks.items() if not task.done()])
                await asyncio.wait(pending, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
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
