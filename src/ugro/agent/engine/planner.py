"""The plan of an attempt: what has to be found out about its nodes, and the exact processes that follow from it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from ugro.agent.artifacts.environments import ExtraEnv
from ugro.agent.engine.preflight import LaunchRefused, Preflight
from ugro.agent.python_env.service import PythonEnvService
from ugro.agent.support.aio import one_error, together
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.node_modules import NodeModules
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.failure import Cause, Failure
from ugro.core.figures import NodeFigures
from ugro.core.job import Job, Placement, Share
from ugro.core.login import node_of
from ugro.core.node import Facts, Gpu
from ugro.core.plan import Plan, Rendezvous
from ugro.core.python_env import Made
from ugro.nodes.node import Node
from ugro.policy.balance.hardware_speed import Device, Speeds, estimate
from ugro.policy.balance.mode import Mode
from ugro.policy.elastic.forming import lack_of_ranks
from ugro.workloads.planning import Surroundings, follows_from_spec, needs_rendezvous, plan

# What is known of a node's devices, if anything is.
_ENVIRONMENTS_PYTHON = "ENVIRONMENT/bin/python"  # its folder is known when it has been resolved
_NO_ENVIRONMENTS: Mapping[str, Made] = {}
KnownFacts = Callable[[Node], Facts | None]


class Planner:
    def __init__(
        self,
        cluster: Cluster,
        watch: RunTracker,
        extra_env: ExtraEnv,
        facts: KnownFacts,
        modules: NodeModules,
        envs: PythonEnvService | None = None,
    ) -> None:
        self._cluster = cluster
        self._envs = envs
        self._extra_env = extra_env
        self._facts = facts
        self.measured: Callable[[str], NodeFigures | None] = lambda node: None  # what was measured of its hardware
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
        facts = self._facts(node)
        gpus = {gpu.index: gpu for gpu in facts.gpus} if facts else {}
        figures = self.measured(node_of(share.node))
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
