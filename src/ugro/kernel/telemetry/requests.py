"""Answers what is asked about metrics of jobs and nodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import get_args

from ugro.features.experiments.rules.table import metric_order
from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.service import JobService
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.operations.request import answers
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.quantities import is_number
from ugro.kernel.telemetry.curves import Curve, Wanted
from ugro.kernel.telemetry.metricstore import job_owner
from ugro.kernel.telemetry.model import is_internal, main_loss
from ugro.kernel.telemetry.operations import (
    Change,
    Column,
    CurveColumns,
    Curves,
    FollowChanges,
    GetMetrics,
    GetNodeHistory,
    ListMetricKeys,
    MetricKeys,
)
from ugro.kernel.telemetry.service import MonitoringService

_ABOUT = ("owner", "attempt", "rank", "key", "count", "width")
_REALS = frozenset({"lows", "highs", "means"})


class MetricRequests:
    def __init__(self, jobs: JobService, cluster: Cluster, monitoring: MonitoringService) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._monitoring = monitoring

    @answers(GetMetrics)
    async def get_metrics(self, asked: GetMetrics, caller: Caller) -> Curves:
        owners = tuple(job_owner(job) for job in await self._numbers(asked.job))
        wanted = Wanted(owners, asked.key, asked.attempt, asked.rank, asked.first, asked.last, asked.bins)
        found = await self._monitoring.metrics.curves(wanted)
        return Curves(tuple(_columns(one, asked.column, asked.digits) for one in found))

    @answers(ListMetricKeys)
    async def list_keys(self, asked: ListMetricKeys, caller: Caller) -> MetricKeys:
        keys = await self._monitoring.job_keys(await self._numbers(asked.job))
        names = {one.key for one in keys if not is_internal(one.key)}
        loss = main_loss(names)
        in_order = sorted(names, key=lambda name: (name != loss, metric_order(name)))
        return MetricKeys(tuple(keys), tuple(in_order), loss)

    @answers(GetNodeHistory)
    async def get_history(self, asked: GetNodeHistory, caller: Caller) -> Curves:
        self._cluster.inventory.named(asked.name)
        wanted = Wanted((), asked.key, first_step=asked.first, last_step=asked.last, bins=asked.bins)
        found = await self._monitoring.node_curves(asked.name, wanted)
        return Curves(tuple(_columns(one) for one in found))

    @answers(FollowChanges)
    async def follow_changes(self, asked: FollowChanges, caller: Caller) -> AsyncGenerator[list[Change]]:
        return self._monitoring.changes(asked.after)

    async def _numbers(self, words: Sequence[str]) -> tuple[int, ...]:
        found = [int(word) if is_number(word) else (await self._jobs.find(word)).id for word in words]
        known = await self._jobs.known(found)
        if missing := [job for job in found if job not in known]:
            raise NotFound(f"there is no job {missing[0]}", hint="see: ugro status")
        return tuple(found)


def _columns(curve: Curve, wanted: Sequence[Column] = (), digits: int | None = None) -> CurveColumns:
    columns = {name: getattr(curve, name) for name in (*_ABOUT, *(wanted or get_args(Column)))}
    for name in _REALS & columns.keys() if digits is not None else ():
        columns[name] = [None if value is None else float(f"{value:.{digits}g}") for value in columns[name]]
    found: CurveColumns = columns  # type: ignore[assignment]
    return found
