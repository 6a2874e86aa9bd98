"""Starting an attempt: what it needs to know is found out and written down once, then every node gets its part."""

from __future__ import annotations

import asyncio

from ugro.agent.cluster import Cluster
from ugro.agent.runwatch import RunWatch
from ugro.core.job import Job
from ugro.core.plan import Plan, Rendezvous
from ugro.nodes.runs import RunStatus
from ugro.store.jobs import JobStore
from ugro.workloads.planning import Surroundings, needs_rendezvous, plan


class Launching:
    def __init__(self, jobs: JobStore, cluster: Cluster, watch: RunWatch) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._watch = watch
        self._planning: dict[int, asyncio.Lock] = {}

    async def start(self, job: Job, node: str) -> RunStatus:
        recorded = await self.plan(job)
        part = next(part for part in recorded.nodes if part.node == node)
        settings = {
            "grace_s": job.spec.stop.grace_s,
            "env": {"UGRO_JOB": str(job.id), "UGRO_ATTEMPT": str(job.attempt), "UGRO_NODE": node},
        }
        return await self._watch.runs(node).start(job.id, job.attempt, part, settings)

    async def plan(self, job: Job) -> Plan:
        """The attempt's plan, made once: after a crash the same processes are asked for, port and all."""
        lock = self._planning.setdefault(job.id, asyncio.Lock())
        async with lock:
            recorded = await self._jobs.plan(job)
            if recorded is None:
                recorded = await self._make(job)
                await self._jobs.record_plan(job, recorded)
        return recorded

    async def _make(self, job: Job) -> Plan:
        assert job.placement is not None
        rendezvous = await self._rendezvous(job) if needs_rendezvous(job) else None
        pythons = {node: self._python(node) for node in job.placement.nodes}
        return plan(job, job.attempt, job.placement, Surroundings(rendezvous, pythons))

    async def _rendezvous(self, job: Job) -> Rendezvous:
        assert job.placement is not None
        first = job.placement.nodes[0]
        port = await self._watch.runs(first).reserve_port(job.id, job.attempt)
        spec = self._cluster.inventory.get(first).spec
        is_here = spec.transport != "ssh"
        address = self._cluster.config.cluster.master_ip or ("127.0.0.1" if is_here else spec.host or spec.name)
        return Rendezvous(address, port)

    def _python(self, node: str) -> str:
        found = self._cluster.inventory.get(node)
        return found.spec.python or (found.machine.python_path if found.machine else "python3")
