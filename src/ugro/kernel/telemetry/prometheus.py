"""Metrics for Prometheus: nodes, GPUs, jobs and the agent, as they are at the scrape."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ugro
from ugro.features.alerts.channels import Notifier
from ugro.features.alerts.model import Severity
from ugro.features.alerts.service import Monitor
from ugro.features.hardware.service import MeasuredHardware, of_hardware
from ugro.features.quotas.rules import Tally
from ugro.features.quotas.service import of_usage
from ugro.features.services.model import ServiceReport
from ugro.features.services.rules.report import of_services
from ugro.features.trackers.service import Figures
from ugro.kernel.access.caller import visible
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Job, JobState
from ugro.kernel.links.model import Gpu, NodeReport, Status
from ugro.kernel.links.rules import BreakerState
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.moments import elapsed_s
from ugro.kernel.telemetry.curves import Wanted
from ugro.kernel.telemetry.metricstore import MetricStore, job_owner
from ugro.kernel.telemetry.model import KeySummary, is_internal
from ugro.kernel.telemetry.prometheus_text import SECONDS, SHORT_SECONDS, Family, Histogram, exposition

_FINAL = frozenset(str(state) for state in FINAL_STATES)
_MOST_METRICS_OF_A_JOB = 50
Services = Callable[[], Awaitable[Sequence[ServiceReport]]]  # those that are not over
Usage = Callable[[], Awaitable[Mapping[str, Tally]]]  # by user


@dataclass(frozen=True, slots=True)
class Sources:
    """Who has figures besides the store."""

    monitor: Monitor
    energy: Callable[[], Mapping[int, float]]  # what jobs used, in joules
    exports: Callable[[], Mapping[str, Figures]]
    measured: MeasuredHardware


class PrometheusMetrics:
    def __init__(
        self,
        store: Store,
        live: LiveJobs,
        sources: Sources,
        metrics: MetricStore,
        notifier: Notifier,
    ) -> None:
        self._store = store
        self._live = live
        self._sources = sources
        self._monitor = sources.monitor
        self._metrics = metrics
        self._notifier = notifier
        self._started_at = time.time()
        self._ended: Counter[str] = Counter()
        self._durations = {str(state): Histogram(SECONDS) for state in FINAL_STATES}
        self._syncs = Histogram(SHORT_SECONDS)
        self._place = 0  # the last event that was counted
        self.services: Services | None = None
        self.usage: Usage | None = None
        self._counting = asyncio.Lock()  # two scrapes at once must not count an end twice

    def observe_sync(self, seconds: float) -> None:
        """Code has been sent to a node."""
        self._syncs.observe(seconds)

    async def text(self) -> str:
        await self._count_ends()
        await self._live.read()
        running = sorted(visible(self._live.holding()), key=lambda job: job.id)
        owners = tuple(job_owner(job.id) for job in running)
        curves = await self._metrics.keys(Wanted(owners, rank=0)) if owners else []
        return exposition(
            [
                *_of_nodes(self._monitor),
                *_of_gpus(self._monitor.reports),
                *self._of_all_jobs(self._live.states()),
                *_of_running(running, curves),
                _energy_of(running, self._sources.energy()),
                *(of_services(await self.services()) if self.services else ()),
                *(of_usage(await self.usage()) if self.usage else ()),
                *await self._of_hardware(self._sources.measured),
                *self._of_agent(await self._metrics.size_bytes()),
            ]
        )

    async def _count_ends(self) -> None:
        """Counts each end once, from the events: of all jobs that were not removed when the agent started."""
        async with self._counting:
            while ends := await self._store.ends.after(self._place):
                self._place = ends[-1].seq
                for end in ends:
                    self._ended[end.state] += 1
                    if end.lasted_s is not None:
                        self._durations[end.state].observe(end.lasted_s)

    async def _of_hardware(self, measured: MeasuredHardware) -> Iterator[Family]:
        kept = self._store.hardware
        return of_hardware(measured.latest, await kept.links(), await kept.allreduces())

    def _of_all_jobs(self, states: Mapping[JobState, int]) -> Iterator[Family]:
        family = Family("ugro_jobs", "gauge", "Jobs that have not ended, by state.")
        for state in JobState:
            if state not in FINAL_STATES:
                family.add(states[state], state=state)
        yield family
        active = Family("ugro_active_tasks", "gauge", "Jobs that hold devices.")
        active.add(sum(states[state] for state in HOLDING_STATES))
        yield active
        ended = Family("ugro_tasks_completed_total", "counter", "Ended jobs, by final state.")
        durations = Family("ugro_task_duration_seconds", "histogram", "From first start to end, by final state.")
        for how in sorted(_FINAL):
            ended.add(self._ended[how], status=how)
            durations.add_histogram(self._durations[how], status=how)
        yield from (ended, durations)
        syncs = Family("ugro_sync_duration_seconds", "histogram", "How long it took to send code to a node.")
        syncs.add_histogram(self._syncs)
        yield syncs

    def _of_agent(self, metrics_bytes: int) -> Iterator[Family]:
        yield _single("ugro_agent_info", "The agent that answers.", 1, version=ugro.__version__)
        yield _single("ugro_agent_start_time_seconds", "When the agent started, since the epoch.", self._started_at)
        yield _single("ugro_metric_store_bytes", "Size of the metric store.", metrics_bytes)
        alerts = Family("ugro_alerts", "gauge", "Active alerts, by severity.")
        counts = Counter(alert.severity for alert in self._monitor.alerts())
        for severity in (Severity.WARNING, Severity.CRITICAL):
            alerts.add(counts[severity], severity=severity)
        yield alerts
        sent = Family("ugro_notifications_total", "counter", "Messages to channels, by outcome.")
        for (channel, outcome), count in sorted(self._notifier.outcomes.items()):
            sent.add(count, channel=channel, outcome=outcome)
        yield sent
        yield from _of_exports(self._sources.exports())


def _of_exports(exports: Mapping[str, Figures]) -> Iterator[Family]:
    points = Family("ugro_export_points_total", "counter", "Points of metrics for another system, by outcome.")
    waiting = Family("ugro_export_spool_points", "gauge", "Points that wait on disk for another system.")
    size = Family("ugro_export_spool_bytes", "gauge", "Size of what waits on disk for another system.")
    for name, figures in exports.items():
        points.add(figures.sent, to=name, outcome="sent")
        points.add(figures.dropped, to=name, outcome="dropped")
        waiting.add(figures.waiting, to=name)
        size.add(figures.spool_bytes, to=name)
    yield from (points, waiting, size)


def _of_nodes(monitor: Monitor) -> Iterator[Family]:
    reports = monitor.reports
    statuses = Counter(report.status for report in reports.values())
    family = Family("ugro_nodes", "gauge", "Nodes by status.")
    for status in Status:
        family.add(statuses[status], status=status)
    yield family
    breakers = Family("ugro_node_breaker_open", "gauge", "Whether a node is not probed because it failed too often.")
    for watched in monitor.watched():
        breakers.add(watched.breaker is not BreakerState.CLOSED, node=watched.name)
    yield breakers
    for name, words, value in _NODE_GAUGES:
        gauge = Family(name, "gauge", words)
        for report in reports.values():
            gauge.add(value(report), node=report.name)
        yield gauge
    disks = Family("ugro_node_disk_used_ratio", "gauge", "How full a node's disk is.")
    for report in reports.values():
        for disk in report.facts.disks if report.facts else ():
            disks.add(disk.used_ratio, node=report.name, mount=disk.mount)
    yield disks


_NODE_GAUGES: tuple[tuple[str, str, Callable[[NodeReport], float | None]], ...] = (
    ("ugro_node_health_score", "A node's health, from 0 to 100.", lambda report: report.score),
    ("ugro_node_up", "Whether a node answered the last time.", lambda report: float(report.facts is not None)),
    ("ugro_node_load1", "Load of the last minute.", lambda report: report.facts.load[0] if report.facts else None),
    (
        "ugro_node_cpu_use_ratio",
        "How busy the cores are.",
        lambda report: report.facts.cpu_use_ratio if report.facts else None,
    ),
    (
        "ugro_node_memory_used_ratio",
        "Memory in use.",
        lambda report: report.facts.memory_used_ratio if report.facts else None,
    ),
    ("ugro_node_link_latency_seconds", "Round trip to a node and back.", lambda report: report.link.rtt_s),
    (
        "ugro_node_owner_present",
        "Whether somebody uses a node for whom jobs make way.",
        lambda report: float(report.owner.is_there) if report.owner else None,
    ),
)


def _of_gpus(reports: dict[str, NodeReport]) -> Iterator[Family]:
    energy = Family("ugro_gpu_energy_joules_total", "counter", "What a GPU has used since its driver was loaded.")
    for report in reports.values():
        for gpu in report.facts.gpus if report.facts else ():
            energy.add(gpu.energy_j, node=report.name, gpu=gpu.index, model=gpu.model)
    yield energy
    for name, words, value in _GPU_GAUGES:
        family = Family(name, "gauge", words)
        for report in reports.values():
            for gpu in report.facts.gpus if report.facts else ():
                family.add(value(gpu), node=report.name, gpu=gpu.index, model=gpu.model)
        yield family


_GPU_GAUGES: tuple[tuple[str, str, Callable[[Gpu], float | None]], ...] = (
    ("ugro_gpu_use_ratio", "How busy a GPU is.", lambda gpu: gpu.use_ratio),
    ("ugro_gpu_memory_used_bytes", "Memory in use on a GPU.", lambda gpu: gpu.memory_used_bytes),
    ("ugro_gpu_memory_bytes", "Memory of a GPU.", lambda gpu: gpu.memory_total_bytes),
    ("ugro_gpu_temperature_celsius", "How hot a GPU is.", lambda gpu: gpu.temperature_c),
    ("ugro_gpu_power_watts", "What a GPU draws.", lambda gpu: gpu.power_w),
    (
        "ugro_gpu_throttled",
        "Whether heat, power or a fault slows a GPU down.",
        lambda gpu: None if gpu.throttle is None else float(bool(gpu.throttle)),
    ),
)


def _of_running(running: Sequence[Job], curves: Sequence[KeySummary]) -> Iterator[Family]:
    elapsed = Family("ugro_job_elapsed_seconds", "gauge", "Since a job's attempt was started; while it holds devices.")
    gpus = Family("ugro_job_gpus", "gauge", "GPUs that a job holds.")
    steps = Family("ugro_job_step", "gauge", "The newest step that a job's first rank has reported.")
    values = Family("ugro_job_metric", "gauge", "The last finite value of a metric of a job's first rank.")
    now = clock.now()
    of_attempts: dict[tuple[str, int], list[KeySummary]] = {}
    for one in curves:
        of_attempts.setdefault((one.owner, one.attempt), []).append(one)
    for job in running:
        labels = {"job_id": job.id, "name": job.spec.name}  # Prometheus uses the label "job" for the target
        if (started := job.attempt_started) is not None:
            elapsed.add(elapsed_s(started, now), **labels)
        gpus.add(sum(len(share.gpus) for share in job.placement.shares) if job.placement else 0, **labels)
        own = of_attempts.get((job_owner(job.id), job.attempt), [])
        if own:
            steps.add(max(one.last_step for one in own), **labels)
        for one in [one for one in own if not is_internal(one.key)][:_MOST_METRICS_OF_A_JOB]:
            values.add(one.last_value, **labels, metric=one.key)
    yield from (elapsed, gpus, steps, values)


def _energy_of(running: Sequence[Job], joules: Mapping[int, float]) -> Family:
    words = "What a job's devices used in all its attempts; while it holds devices, where it is measured."
    family = Family("ugro_job_energy_joules_total", "counter", words)
    for job in running:
        if job.id in joules:
            family.add(joules[job.id], job_id=job.id, name=job.spec.name)
    return family


def _single(name: str, words: str, value: float, **labels: object) -> Family:
    family = Family(name, "gauge", words)
    family.add(value, **labels)
    return family
