"""Launching an attempt: its code is brought to its nodes, its plan recorded, its ranks started everywhere at once.

What is only in memory here (which nodes were asked, why an attempt cannot start) is found out again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ugro.features.environments.model import Made
from ugro.features.environments.rules.imports import failure_of
from ugro.features.environments.service.installed import ExtraEnv, NodeModules
from ugro.features.environments.service.service import PythonEnvService
from ugro.features.hardware.model import NodeFigures
from ugro.features.hardware.rules import Device, Speeds, estimate
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.model import PUT_BACK
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.results.collector import Collector, may_be_put_back
from ugro.kernel.jobs.engine.leases import Leases, lease_s
from ugro.kernel.jobs.engine.plan import Surroundings, cpu_limit, follows_from_spec, needs_rendezvous, plan, ticket_of
from ugro.kernel.jobs.engine.preflight import LaunchRefused, Preflight
from ugro.kernel.jobs.engine.rules.postmortem import disk_hint
from ugro.kernel.jobs.engine.rules.reported_run import shares_supervisor
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Moment, RunStart, RunStatus
from ugro.kernel.jobs.model import Cause, Failure, Job, Placement, Share
from ugro.kernel.jobs.records import NodePlan, Plan, Rendezvous
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import Facts, Gpu
from ugro.kernel.links.node import Node
from ugro.kernel.support.aio import Batcher, one_error, together
from ugro.kernel.support.errors import EnvFailed, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.process import point
from ugro.node import machine as disk
from ugro.node.files.folders import NO_FOLDER
from ugro.train.rules.failures import lack_of_ranks
from ugro.train.rules.shares import Mode

# --- the plan of an attempt -------------------------------------------------------------------------------------------
# Finds out about its nodes what the plan needs, and makes the exact processes that follow.


_ENVIRONMENTS_PYTHON = "ENVIRONMENT/bin/python"  # its folder is known when it has been resolved
_NO_ENVIRONMENTS: Mapping[str, Made] = {}
KnownFacts = Callable[[Node], Facts | None]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is known of the nodes' devices."""

    facts: KnownFacts
    measured: Callable[[str], NodeFigures | None] = lambda node: None


class Planner:
    def __init__(
        self,
        cluster: Cluster,
        watch: RunTracker,
        extra_env: ExtraEnv,
        hardware: Hardware,
        modules: NodeModules,
        envs: PythonEnvService | None = None,
    ) -> None:
        self._cluster = cluster
        self._envs = envs
        self._extra_env = extra_env
        self._hardware = hardware
        self.preflight = Preflight(cluster, watch, modules)

    def known(self, job: Job) -> Plan | None:
        """The plan of a job about whose nodes nothing has to be found out: there is no need to record it."""
        if job.placement is None or not follows_from_spec(job.spec):
            return None
        return plan(job, job.attempt, job.placement, self._surroundings(job.placement, None, {}))

    async def environments(self, job: Job) -> Mapping[str, Made]:
        """The Python environments that its nodes have for it when this returns. Raises EnvFailed."""
        return await self._envs.ensure_for(job) if self._envs is not None else {}

    def moved_at(self, job: Job) -> float:
        """When the making of its environment last made progress, by the monotonic clock; 0 if there is none."""
        if self._envs is None or job.spec.environment is None or job.placement is None:
            return 0.0
        return self._envs.moved_at(job.placement.nodes)

    async def make(
        self, job: Job, environments: Mapping[str, Made], sdk: str | None = None
    ) -> tuple[Plan, tuple[str, ...]]:
        """With notes for the user. ``environments``: of its nodes, if the job has one. ``sdk``: UGRO's own package.

        Raises ``LaunchRefused`` when the attempt must not start.
        """
        assert job.placement is not None
        placement = job.placement
        await self.preflight.set_up(job, placement, environments)
        async with one_error() as group:
            rendezvous = group.create_task(self._rendezvous(job, placement))
            notes = group.create_task(self.check(job, placement, environments))
            extra = group.create_task(together(self._extra(job, node) for node in placement.nodes))
        extra_env = dict(zip(placement.nodes, extra.result(), strict=True))
        surroundings = self._surroundings(placement, rendezvous.result(), extra_env, self._speeds(job, placement))
        secret = secrets.token_hex(32)
        surroundings = replace(surroundings, environments=environments, sdk=sdk, secret=secret)
        return plan(job, job.attempt, placement, surroundings), notes.result()

    async def check(
        self, job: Job, placement: Placement, environments: Mapping[str, Made] = _NO_ENVIRONMENTS
    ) -> tuple[str, ...]:
        """Raises ``LaunchRefused`` for an attempt that must not start there; returns notes for the user.

        Of what its setup or the making of its environment will change, nothing is said before that is done.
        """
        ranks = sum(max(1, len(share.gpus)) for share in placement.shares)
        if (lack := lack_of_ranks(job.spec.elastic.min_ranks, ranks)) is not None:
            raise LaunchRefused(Failure(Cause.MISMATCH, lack[0], hint=lack[1]))
        is_open = job.spec.environment is not None and not environments
        return () if is_open else await self.preflight.agree(job, placement, environments)

    def preview(self, job: Job, placement: Placement) -> Plan:
        """What ``make`` would make, as far as that can be said without asking or changing anything."""
        rendezvous = self.preflight.guess(placement) if needs_rendezvous(job) else None
        surroundings = self._surroundings(placement, rendezvous, {}, self._speeds(job, placement))
        if job.spec.environment is not None:
            surroundings = replace(surroundings, pythons=dict.fromkeys(placement.nodes, _ENVIRONMENTS_PYTHON))
        return plan(job, max(1, job.attempt), placement, surroundings)

    def forget(self, job: Job) -> None:
        """Its attempt failed: what was found out about its nodes is found out again before the next."""
        self.preflight.forget(job.placement.nodes if job.placement else ())

    async def _extra(self, job: Job, node: str) -> Mapping[str, str]:
        return await self._extra_env(job, node)

    async def _rendezvous(self, job: Job, placement: Placement) -> Rendezvous | None:
        return await self.preflight.rendezvous(job, placement) if needs_rendezvous(job) else None

    def _speeds(self, job: Job, placement: Placement) -> Speeds | None:
        if job.spec.balance != Mode.STATIC:
            return None
        return estimate([device for share in placement.shares for device in self._devices(share)])

    def _devices(self, share: Share) -> list[Device]:
        node = self._cluster.inventory.get(node_of(share.node))  # the node itself is probed, not a login
        facts = self._hardware.facts(node)
        gpus = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
        figures = self._hardware.measured(node_of(share.node))
        if share.gpus:
            return [_gpu(gpus.get(index), node, figures) for index in share.gpus]
        machine = node.machine
        return [Device(None, machine.cores, machine.cpu_model, None, figures) if machine else Device(None)]

    def _surroundings(
        self,
        placement: Placement,
        rendezvous: Rendezvous | None,
        extra_env: Mapping[str, Mapping[str, str]],
        speeds: Speeds | None = None,
    ) -> Surroundings:
        nodes = [self._cluster.inventory.get(name) for name in placement.nodes]
        return Surroundings(
            rendezvous,
            {node.spec.name: _python(node) for node in nodes},
            {node.spec.name: dict(node.spec.env) for node in nodes},
            extra_env,
            speeds,
        )


def _gpu(gpu: Gpu | None, node: Node, figures: NodeFigures | None) -> Device:
    if gpu is None:
        return Device(node.spec.gpu or "an unknown GPU")
    return Device(gpu.name, measured=figures.device(gpu.uuid) if figures else None)


def _python(node: Node) -> str:
    """The one that runs the node program: its whole path, and the one whose packages were compared."""
    return node.machine.python_path if node.machine else node.spec.python or "python3"


# --- launching --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# A node that was fit to be chosen and then cannot be talked to for so long is passed over.
_PREPARE_S = 20.0
# From asking to every rank running; the program may be on a slow file server.
_START_S = 120.0
_AGAIN_S = 0.5
_NO_CODE = "no-code"
_PASSING = frozenset({"busy", "crashed", "cancelled", _NO_CODE, NO_FOLDER})
_NODES_OWN_SIGNAL = "TERM"
# What a refusal of a node means, by its kind.
_CAUSES = {
    "other-boot": Cause.NODE_REBOOTED,
    disk.NO_SPACE: Cause.DISK_FULL,
    "gpu-busy": Cause.GPU_UNAVAILABLE,
    "gpu-changed": Cause.GPU_UNAVAILABLE,
}

Key = tuple[int, int]  # job and attempt


class Launch:
    def __init__(
        self, jobs: JobStore, watch: RunTracker, leases: Leases, planner: Planner, code: Code, collector: Collector
    ) -> None:
        self._collector = collector
        self._jobs = jobs
        self._watch = watch
        self._leases = leases
        self._planner = planner
        self._code = code
        self._starts: Batcher[RunStart, RunStatus] = Batcher(self._send)
        self._since: dict[Key, float] = {}
        self._asked_at: dict[Key, float] = {}
        self._asked: dict[Key, set[str]] = {}  # only for attempts whose start was decided by this very process
        self._refusals: dict[Key, Failure] = {}
        self._begins_as: dict[Key, str] = {}  # the tree with files of earlier attempts

    # --- an attempt, from its code to its ranks -------------------------------------------------------------------

    async def start(self, job: Job, nodes: tuple[str, ...]) -> None:
        """May be cancelled at any point: the nodes that were asked are known, and are asked to stop."""
        self._note_begun(job)
        try:
            await self._code.bring(job.spec.snapshot, nodes)
            await self._code.folders.bring(job.spec.folders, nodes)
            plan = await self.plan(job, await self._environments(job))
            if job.spec.sdk:
                await self._bring_sdk(plan, nodes)
            if any(part.code is not None for part in plan.nodes):
                await self._bring_earlier_files(job, plan, nodes)
        except LaunchRefused as error:
            self._refuse(job, error.failure)
        except UgroError as error:
            self._note_failure(job, error)
            await asyncio.sleep(_AGAIN_S)
        else:
            point("start.planned")
            await asyncio.gather(*(self._start_on(node, job, plan) for node in nodes))

    async def _bring_sdk(self, plan: Plan, nodes: tuple[str, ...]) -> None:
        """The one that was recorded: a newer agent may have another by now."""
        for tree in {part.sdk for part in plan.nodes}:
            await self._code.bring(tree, nodes)

    async def _with_earlier_files(self, job: Job) -> tuple[str | None, tuple[str, ...]]:
        """The tree that the job's folder begins as, and words for the user; None: its code alone."""
        snapshot = job.spec.snapshot
        is_code = partial(self._code.holds, snapshot) if snapshot is not None else lambda path: False
        found = await self._collector.made_before(job, is_code)
        files = {name: path for name, (path, _) in found.files.items()}
        return await self._code.with_files(snapshot, files) if files else None, found.words()

    async def _bring_earlier_files(self, job: Job, plan: Plan, nodes: tuple[str, ...]) -> None:
        tree = plan.nodes[0].code
        assert tree is not None
        if not self._code.has(tree):  # it was cleaned up since
            again, _ = await self._with_earlier_files(job)
            if again != tree:
                text = "the files of earlier attempts are no longer what they were"
                raise LaunchRefused(Failure(Cause.START_FAILED, text, hint="without them: retry: {put_back: false}"))
        self._begins_as[job.id, job.attempt] = tree
        await self._code.bring(tree, nodes)

    async def _environments(self, job: Job) -> Mapping[str, Made]:
        """Makes the job's Python environment on its nodes; also if it was there before, and somebody removed it."""
        if job.spec.environment is None:
            return {}
        try:
            return await self._planner.environments(job)
        except EnvFailed as error:
            is_existing = job.spec.environment.existing is not None
            raise LaunchRefused(failure_of(error, is_existing=is_existing)) from error

    async def plan(self, job: Job, environments: Mapping[str, Made] = _NO_ENVIRONMENTS) -> Plan:
        """The attempt's plan, made once: after a crash the same processes are asked for, port and all.

        Raises ``LaunchRefused`` when the attempt must not start.
        """
        plan = self._planner.known(job) or await self._jobs.plan(job)
        if plan is None:
            sdk = await self._code.sdk() if job.spec.sdk else None
            plan, notes = await self._planner.make(job, environments, sdk)
            told = [("preflight", note) for note in notes]
            if may_be_put_back(job):
                tree, words = await self._with_earlier_files(job)
                plan = replace(plan, nodes=tuple(replace(part, code=tree) for part in plan.nodes))
                told += [(PUT_BACK, text) for text in words]
            point("start.checked")
            await self._jobs.record_plan(job, plan)
            for kind, text in told:
                await self._jobs.note(kind, text, job=job)
        return plan

    async def _start_on(self, node: str, job: Job, plan: Plan) -> None:
        try:
            as_of = await self._leases.begin(job, node)
            self._note_asked(job, node)
            point("start.asked")
            start = run_start(job, node, plan, as_of, self._ticket(job))
            status = await self._starts.request(node, start)
        except (Unreachable, TimedOut) as error:
            log.warning("cannot start there yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(_AGAIN_S)
        except UgroError as error:
            self._note_refusal(job, node, error)
            await asyncio.sleep(_AGAIN_S)
        else:
            point("start.answered")
            if (job.id, job.attempt) in self._asked_at:  # else it is over by now, and gone from the node
                self._watch.learn(node, status)

    def _ticket(self, job: Job) -> str | None:
        """Kept on the node: should an older state be put back, it can be caught up by it."""
        identity = self._watch.identity
        return ticket_of(identity.key, identity.agent, job)

    async def _send(self, node: str, starts: Sequence[RunStart]) -> Sequence[RunStatus | UgroError]:
        return await self._watch.runs(node).start(starts)

    async def close(self) -> None:
        await self._starts.close()

    # --- what is known of it ----------------------------------------------------------------------------------------

    def decided(self, job: Job) -> None:
        self._asked[job.id, job.attempt] = set()

    def refusal(self, job: Job) -> Failure | None:
        return self._refusals.get((job.id, job.attempt))

    def is_overdue(self, job: Job) -> bool:
        key = (job.id, job.attempt)
        if key not in self._since and key not in self._asked:
            # Asked for by an agent before us: it has as long as if it had been now.
            self._asked_at.setdefault(key, time.monotonic())
        asked_at = self._asked_at.get(key)
        return asked_at is not None and time.monotonic() - asked_at > _START_S

    def was_never_asked(self, job: Job, node: str) -> bool:
        asked = self._asked.get((job.id, job.attempt))
        return asked is not None and node not in asked

    def forget(self, job: int, attempt: int) -> None:
        for known in (self._since, self._asked_at, self._asked, self._refusals, self._begins_as):
            known.pop((job, attempt), None)

    def check_again(self, job: Job) -> None:
        """Its attempt failed: what was found out about its nodes is found out again before the next."""
        self._planner.forget(job)

    def _note_begun(self, job: Job) -> None:
        """An agent before us may have asked already: then the time that ranks have to start begins again."""
        key = (job.id, job.attempt)
        if key not in self._since:
            self._since[key] = time.monotonic()
            self._asked_at.pop(key, None)

    def _note_asked(self, job: Job, node: str) -> None:
        key = (job.id, job.attempt)
        self._asked_at.setdefault(key, time.monotonic())
        if key in self._asked:
            self._asked[key].add(node)

    def _note_failure(self, job: Job, error: UgroError) -> None:
        """Of what comes before a start: it is tried again, unless it cannot succeed or takes too long."""
        if _is_passing(error) and error.subject:
            self._code.forget_all(job.spec, error.subject, self._begins_as.get((job.id, job.attempt)))
        elif not isinstance(error, Unreachable | TimedOut) or self._is_late(job):
            self._refuse(job, _failure(error, str(error), error.subject))

    def _is_late(self, job: Job) -> bool:
        """Code and packages that are on their way may take hours; they go on where they were."""
        since, begins_as = self._since[job.id, job.attempt], self._begins_as.get((job.id, job.attempt))
        moved_at = max(self._code.moved_at(job, begins_as), self._planner.moved_at(job))
        return time.monotonic() - max(since, moved_at) > _PREPARE_S

    def _note_refusal(self, job: Job, node: str, error: UgroError) -> None:
        if isinstance(error, RemoteFailure) and error.cause in (_NO_CODE, NO_FOLDER):
            self._code.forget_all(job.spec, node, self._begins_as.get((job.id, job.attempt)))
        if not _is_passing(error):
            self._refuse(job, _failure(error, f"{node_of(node)}: {error.message}", node))

    def _refuse(self, job: Job, failure: Failure) -> None:
        self._refusals.setdefault((job.id, job.attempt), failure)


def _failure(error: UgroError, reason: str, node: str | None) -> Failure:
    """Of an attempt that did not start. The node's word for what was wrong decides whether it is tried again."""
    word = error.cause if isinstance(error, RemoteFailure) else None
    cause = _CAUSES.get(word or "", Cause.START_FAILED)
    hint = disk_hint(node) if cause is Cause.DISK_FULL and node else error.hint
    return Failure(cause, reason, node=node, hint=hint)


def _is_passing(error: UgroError) -> bool:
    return isinstance(error, RemoteFailure) and error.cause in _PASSING


def run_start(
    job: Job, node: str, plan: Plan, as_of: Moment | None = None, ticket: str | None = None
) -> RunStart:
    """Whatever is sent follows from what was recorded, and is the same each time it is asked for."""
    assert job.placement is not None
    part = next(part for part in plan.nodes if part.node == node)
    share = job.placement.on(node)
    settings = {
        **_settings(job), **_folders(job), **_environment(job, part), **_gpus(job, share), **_limits(job, share),
        **({"elastic": True} if job.spec.elastic.min_ranks is not None else {}),
    }  # fmt: skip
    return RunStart(job.id, job.attempt, part, settings, share.boot_id, share.root, as_of, ticket)


def _environment(job: Job, part: NodePlan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if part.environment is not None:
        found["environment"] = part.environment
    if part.path:
        found["path"] = list(part.path)
    if part.sdk is not None:
        found["sdk"] = part.sdk
    if part.code is not None:
        found |= {"code": part.code, "base": job.spec.snapshot}
    return found


def _folders(job: Job) -> dict[str, Any]:
    found = {one.name: {"tree": one.tree, "file": one.file} for one in job.spec.folders}
    return {"folders": found} if found else {}


def _gpus(job: Job, share: Share) -> dict[str, Any]:
    """By which the node locks them, and what it tells those who want them meanwhile."""
    if not share.uuids:
        return {}
    found = {"gpus": [list(gpu) for gpu in zip(share.gpus, share.uuids, strict=True)], "user": job.user}
    sharing = job.spec.resources.sharing
    return found if sharing is None or not share.gpu_group else {**found, "share": [share.gpu_group, sharing.most]}


def _limits(job: Job, share: Share) -> dict[str, Any]:
    limits = {"memory_bytes": share.memory_bytes, "cpus": cpu_limit(job, share)}
    return {name: limit for name, limit in limits.items() if limit}


def _settings(job: Job) -> dict[str, Any]:
    spec = job.spec
    settings: dict[str, Any] = {"grace_s": spec.stop.grace_s}
    if shares_supervisor(job):
        settings["shared"] = True
    if spec.stop.signal != _NODES_OWN_SIGNAL:
        settings["stop_signal"] = spec.stop.signal
    if spec.snapshot is not None:
        settings["code"] = spec.snapshot
    if spec.outputs:
        settings["outputs"] = list(spec.outputs)
    if not spec.results.workdir:
        settings["workdir"] = False
    if spec.checkpoint_dir is not None:
        settings["checkpoint_dir"] = spec.checkpoint_dir
    if (limit_s := lease_s(job)) is not None:
        settings["lease_s"] = limit_s
    return settings
