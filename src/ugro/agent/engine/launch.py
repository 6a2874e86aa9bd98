"""Starting an attempt: what it needs to know is found out and written down once, then every node gets its part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ugro.agent.artifacts.environments import ExtraEnv
from ugro.agent.code.service import Code
from ugro.agent.engine.preflight import Preflight
from ugro.agent.support.aio import one_error, together
from ugro.agent.support.crashpoint import point
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.errors import UgroError
from ugro.core.job import Job, Launcher, OnLost, Placement, Share
from ugro.core.node import Facts
from ugro.core.plan import Plan, Rendezvous
from ugro.nodes.node import Node
from ugro.nodes.runs import Moment, RunStart, RunStatus
from ugro.policy.balance.hardware_speed import Device, Speeds, estimate
from ugro.policy.balance.mode import Mode
from ugro.policy.lifecycle.supervision import shares_supervisor
from ugro.store.jobs import JobStore
from ugro.workloads.planning import Surroundings, needs_rendezvous, plan

# What is known of a node's devices, if anything is.
Told = Callable[[Node], Facts | None]
_NODES_OWN_SIGNAL = "TERM"


class Launching:
    def __init__(
        self,
        jobs: JobStore,
        cluster: Cluster,
        watch: RunWatch,
        extra_env: ExtraEnv | None = None,
        code: Code | None = None,
        facts: Told | None = None,
    ) -> None:
        self._jobs = jobs
        self._code = code
        self._cluster = cluster
        self._watch = watch
        self._extra_env = extra_env
        self._facts = facts
        self._planning: dict[tuple[int, int], asyncio.Lock] = {}
        self._plans: dict[tuple[int, int], Plan] = {}  # of attempts that are being started
        self.preflight = Preflight(cluster, watch)

    async def bring_code(self, jobs: Sequence[Job], nodes: Iterable[str]) -> None:
        """What they run in is there when this returns; each tree is asked for once."""
        if self._code is not None:
            for snapshot in dict.fromkeys(job.spec.snapshot for job in jobs):
                await self._code.bring(snapshot, nodes)

    def forget_code(self, job: Job, node: str) -> None:
        """The node says that it is not there."""
        if self._code is not None:
            self._code.forget(job.spec.snapshot, node)

    def code_moved_at(self, job: Job) -> float:
        return self._code.moved_at(job) if self._code is not None else 0.0

    async def start(self, job: Job, node: str, as_of: Moment | None = None) -> RunStatus:
        """Can be asked again: whatever is sent comes from what was written down, and is the same each time."""
        [result] = await self._watch.runs(node).start([replace(_order(job, node, await self.plan(job)), as_of=as_of)])
        if isinstance(result, UgroError):
            raise result
        return result

    async def start_many(self, jobs: Sequence[Job], node: str) -> list[RunStatus | UgroError]:
        """Of plain commands, which all run on this node alone."""
        orders = [_order(job, node, await self.plan(job)) for job in jobs]
        return await self._watch.runs(node).start(orders)

    async def plan(self, job: Job) -> Plan:
        """The attempt's plan, made once: after a crash the same processes are asked for, port and all.

        Raises ``LaunchRefused`` when the attempt must not start.
        """
        key = (job.id, job.attempt)
        async with self._planning.setdefault(key, asyncio.Lock()):
            if key not in self._plans:
                self._plans[key] = self._known(job) or await self._recorded(job)
        self._planning.pop(key, None)
        return self._plans[key]

    def forget(self, job: int, attempt: int) -> None:
        """It has ended: nobody will ask for its plan again."""
        self._plans.pop((job, attempt), None)

    def _known(self, job: Job) -> Plan | None:
        """A plain command's plan follows from the job and its placement: there is nothing to find out or remember."""
        is_plain = job.spec.launcher is Launcher.COMMAND and not job.spec.setup and not job.spec.checkpoint.is_given
        if not is_plain or job.spec.is_cached or job.placement is None:
            return None
        return plan(job, job.attempt, job.placement, self._surroundings(job.placement, None, {}))

    async def _recorded(self, job: Job) -> Plan:
        recorded = await self._jobs.plan(job)
        if recorded is None:
            recorded, notes = await self._make(job)
            point("start.checked")
            await self._jobs.record_plan(job, recorded)
            for note in notes:
                await self._jobs.note("preflight", note, job=job)
        return recorded

    def preview(self, job: Job, placement: Placement) -> Plan:
        """What ``plan`` would make, as far as that can be said without asking or changing anything."""
        rendezvous = self.preflight.guess(placement) if needs_rendezvous(job) else None
        surroundings = self._surroundings(placement, rendezvous, {}, self._speeds(job, placement))
        return plan(job, max(1, job.attempt), placement, surroundings)

    async def _make(self, job: Job) -> tuple[Plan, tuple[str, ...]]:
        assert job.placement is not None
        placement = job.placement
        await self.preflight.set_up(job, placement)
        async with one_error() as group:
            rendezvous = group.create_task(self._rendezvous(job, placement))
            notes = group.create_task(self.preflight.agree(job, placement))
            extra = group.create_task(self._extra(job, placement))
        speeds = self._speeds(job, placement)
        surroundings = self._surroundings(placement, rendezvous.result(), extra.result(), speeds)
        return plan(job, job.attempt, placement, surroundings), notes.result()

    async def _rendezvous(self, job: Job, placement: Placement) -> Rendezvous | None:
        return await self.preflight.rendezvous(job, placement) if needs_rendezvous(job) else None

    async def _extra(self, job: Job, placement: Placement) -> dict[str, Mapping[str, str]]:
        if self._extra_env is None:
            return {}
        ask = self._extra_env

        async def asked(node: str) -> Mapping[str, str]:
            return await ask(job, node)

        found = await together(asked(node) for node in placement.nodes)
        return dict(zip(placement.nodes, found, strict=True))

    def _speeds(self, job: Job, placement: Placement) -> Speeds | None:
        if job.spec.balance != Mode.STATIC:
            return None
        return estimate([device for share in placement.shares for device in self._devices(share)])

    def _devices(self, share: Share) -> list[Device]:
        node = self._cluster.inventory.get(share.node)
        facts = self._facts(node) if self._facts else None
        names = {gpu.index: gpu.name for gpu in facts.gpus} if facts else {}
        if share.gpus:
            return [Device(names.get(index, node.spec.gpu or "an unknown GPU")) for index in share.gpus]
        machine = node.machine
        return [Device(None, machine.cores, machine.cpu_model) if machine else Device(None)]

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


def _python(node: Node) -> str:
    """The one that runs the node program: its whole path, and the one whose packages were compared."""
    return node.machine.python_path if node.machine else node.spec.python or "python3"


def _order(job: Job, node: str, recorded: Plan) -> RunStart:
    assert job.placement is not None
    part = next(part for part in recorded.nodes if part.node == node)
    share = job.placement.on(node)
    return RunStart(job.id, job.attempt, part, _settings(job), share.boot_id, share.root)


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
    if spec.disconnect.on_lost is OnLost.RESTART:
        settings["lease_s"] = spec.disconnect.lost_after_s
    return settings
