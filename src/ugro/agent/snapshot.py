"""What the scheduler sees: nodes by their latest reports, waiting jobs, and what the others hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from ugro.agent.cluster import Cluster
from ugro.agent.health import HealthCheck
from ugro.core.job import HOLDING_STATES, Job, JobState
from ugro.core.node import Gpu, NodeReport, Status
from ugro.policy.snapshot import GpuView, Holding, NodeView, Snapshot, Waiting
from ugro.store.jobs import JobStore

_REPORT_AGE_S = 5.0


class Snapshots:
    def __init__(self, jobs: JobStore, cluster: Cluster, health: HealthCheck) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._health = health

    async def take(self, waiting: Sequence[Job]) -> Snapshot:
        reports = await self._health.recent(max_age_s=_REPORT_AGE_S)
        holding = await self._jobs.in_states(HOLDING_STATES)
        named = sorted({number for job in waiting for number in (*job.spec.after.ok, *job.spec.after.any)})
        return Snapshot(
            now=time.time(),
            nodes=tuple(_node(report) for report in reports),
            waiting=tuple(_waiting(job) for job in waiting),
            holding=tuple(_holding(job) for job in holding if job.placement is not None),
            ended=await self._jobs.states_of(named),
        )


def _node(report: NodeReport) -> NodeView:
    machine, facts = report.machine, report.facts
    return NodeView(
        name=report.name,
        cores=machine.cores if machine else 0,
        memory_bytes=machine.memory_total_bytes if machine else 0,
        gpus=tuple(_gpu(gpu) for gpu in facts.gpus) if facts else (),
        labels=report.labels,
        unusable=_objection(report),
    )


def _objection(report: NodeReport) -> str | None:
    if report.status in (Status.UNREACHABLE, Status.UNHEALTHY):
        return f"is {report.status}"
    if report.drained is not None:
        return f"is drained: {report.drained}" if report.drained else "is drained"
    return None


def _gpu(gpu: Gpu) -> GpuView:
    return GpuView(
        index=gpu.index,
        model=gpu.name,
        memory_bytes=gpu.memory_total_bytes,
        is_foreign=any(not process.is_ours for process in gpu.processes),
        is_broken=gpu.error is not None,
    )


def _waiting(job: Job) -> Waiting:
    return Waiting(
        id=job.id,
        user=job.user,
        spec=job.spec,
        submitted_at=_seconds(job.submitted_at),
        state=job.state,
        attempt=job.attempt,
        not_before=job.tries.not_before,
        avoid=job.tries.avoid,
    )


def _holding(job: Job) -> Holding:
    assert job.placement is not None
    return Holding(
        id=job.id,
        user=job.user,
        priority=job.spec.priority,
        placement=job.placement,
        submitted_at=_seconds(job.submitted_at),
        started_at=_seconds(job.started_at) if job.started_at else None,
        time_limit_s=job.spec.time_limit_s,
        is_preemptible=job.spec.is_preemptible,
        is_stopping=job.state is JobState.STOPPING,
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
