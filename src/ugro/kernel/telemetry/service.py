"""Monitoring: the metric store, the monitor, alerts, notifications and the stream of changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.features.alerts.channels import Message, Notifier
from ugro.features.alerts.config import LOG
from ugro.features.alerts.model import Tried
from ugro.features.alerts.operations import TestChannels, TriedChannels
from ugro.features.alerts.service import JobNotifications, Monitor, Sources
from ugro.features.hardware.service import MeasuredHardware
from ugro.features.trackers.config import ExportSection
from ugro.features.trackers.service import ExportService
from ugro.features.training.config import EnergySection
from ugro.features.training.rules_energy import Price
from ugro.features.training.service import EnergyService, Headlines
from ugro.kernel.access.caller import viewer
from ugro.kernel.access.model import Caller, node_of
from ugro.kernel.files.results.log_stream import agent_stops
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.rules.attempt import RunState
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.store import EndStore, JobStore
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import NodeReport
from ugro.kernel.links.reports import Ranks
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal, keep_running, wait_for_any
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.curves import Curve, Wanted
from ugro.kernel.telemetry.metricstore import JOB, MetricStore, job_owner, node_owner
from ugro.kernel.telemetry.model import KeySummary, Measured, is_averaged, is_internal
from ugro.kernel.telemetry.operations import Change
from ugro.kernel.telemetry.prometheus import PrometheusMetrics, Services, Usage
from ugro.kernel.telemetry.prometheus import Sources as Figures

# --- metrics of jobs --------------------------------------------------------------------------------------------------
# They are read from the collected files of jobs while they run, and again after they have ended.


log = logging.getLogger(__name__)

_EVERY_S = 1.0
# Files may arrive after the job's end: they are read again after these times.
_AFTERWARDS_S = (0.0, 5.0, 30.0, 300.0)


class MetricsIngest:
    def __init__(
        self, collector: Collector, jobs: JobStore, ends: EndStore, holding: Callable[[], Sequence[Job]]
    ) -> None:
        self._collector = collector
        self._jobs = jobs
        self._ends = ends
        self._holding = holding
        self._place = 0
        self._told: dict[int, set[str]] = {}  # files with endless lines, of which an event says so
        self._later: dict[int, list[float]] = {}  # when to look (again) at jobs that have ended

    async def run(self) -> None:
        self._place = await self._ends.newest()
        # Including files that arrived while no agent was running.
        self._later = {job: [0.0] for job in await asyncio.to_thread(self._collector.jobs)}
        while True:
            try:
                if not self._collector.has_no_room:  # the files stay, and are read when there is some
                    await self._look()
            except UgroError as error:
                log.error("cannot read which jobs have ended: %s", error)
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        now = time.monotonic()
        while ends := await self._ends.after(self._place):
            self._place = ends[-1].seq
            self._later |= {end.job: [now + after_s for after_s in _AFTERWARDS_S] for end in ends}
        live = {job.id for job in self._holding()}
        over = {job for job, times in self._later.items() if times[0] <= now}
        for job in await self._collector.having_news(live - over, over):
            await self._ingest(job, is_over=job not in live)
        for job in over:
            self._later[job].pop(0)
            if not self._later[job]:
                del self._later[job]
                self._told.pop(job, None)

    async def _ingest(self, job: int, *, is_over: bool) -> None:
        try:
            await (self._collector.finish(job) if is_over else self._collector.collect(job))
            for name in self._collector.take_cut(job) - self._told.get(job, set()):
                self._told.setdefault(job, set()).add(name)
                text = f"{name} has a line of more than 1 MiB: it is not read as metrics"
                await self._jobs.note("metrics", text, job=await self._jobs.get(job))
        except (UgroError, OSError) as error:
            log.error("cannot read its metrics: %s", error, extra={"job": job})


# --- the parts of monitoring ------------------------------------------------------------------------------------------


_LOOK_S = 0.5
_PAGE_S = 10.0
_CATCH_UP_S = 5.0
_DAY_S = 86400
_ALIVE = (RunState.STARTING, RunState.RUNNING)


class MonitoringService:
    def __init__(
        self,
        home: StateDir,
        store: Store,
        cluster: Cluster,
        live: LiveJobs,
        sources: Sources,
        measured: MeasuredHardware,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self.live = live
        self._rounds = sources.rounds
        self.export = ExportService(
            home.path / "export",
            lambda: cluster.config.section(ExportSection),
            lambda: cluster.config.cluster.name,
            lambda text: store.jobs.note("export", text),
        )
        self.metrics = MetricStore(home.metrics, self.export.take)
        collector = self._collector = Collector(home.jobs, self.metrics)
        self.energy = EnergyService(
            home.jobs, store.jobs, self.metrics, lambda: _price(cluster),
            lambda jobs: self._note_grown(frozenset(map(job_owner, jobs))),
        )  # fmt: skip
        notifier = self.notifier = Notifier(lambda: cluster.config.channels)
        self.monitor = monitor = Monitor(cluster, sources, store.alerts, self.metrics, notifier)
        self.headlines = Headlines(home.jobs, self.metrics, lambda: monitor.reports, self.energy.brief)
        figures = Figures(monitor, lambda: self.energy.totals, self.export.figures, measured)
        self.parts = _Parts(
            JobNotifications(store, cluster, notifier, live.changed),
            MetricsIngest(collector, store.jobs, store.ends, live.holding),
            PrometheusMetrics(store, live, figures, self.metrics, notifier),
        )
        self.grown = ChangeSignal()  # the metrics of some job
        self._grown: dict[int, int] = {}  # by job, the count of ``grown`` when its curves grew
        self._grown_lately: deque[tuple[float, int]] = deque()  # when, and the count before
        self.on_removed: list[Callable[[Sequence[int]], None]] = []
        self._is_ending = False

    async def open(self) -> None:
        await self.metrics.open()
        self.metrics.listen(self._note_grown)

    def use_services(self, services: Services) -> None:
        """What services do, for Prometheus."""
        self.parts.prometheus.services = services

    def use_usage(self, usage: Usage) -> None:
        """What users use, for Prometheus."""
        self.parts.prometheus.usage = usage

    async def run(self) -> None:
        parts = self.parts
        async with asyncio.TaskGroup() as group:
            works = (
                *(self.monitor.run, parts.notifications.run, parts.ingest.run, self.energy.run, self._note_work),
                self.export.run,
            )
            for work in works:
                group.create_task(keep_running(work), name=f"keep {work.__qualname__}")

    async def close(self) -> None:
        await self.notifier.close()
        await self.metrics.close()

    def end_streams(self) -> None:
        self._is_ending = True
        self.grown.notify()

    def forget_jobs(self, jobs: Sequence[int]) -> None:
        """To be called when jobs have been removed."""
        for job in jobs:
            self._grown.pop(job, None)
        self.energy.forget(jobs)
        for forget in self.on_removed:
            forget(jobs)

    # --- requests ----------------------------------------------------------------------------------------------

    async def node_curves(self, node: str, wanted: Wanted) -> list[Curve]:
        """Of the last day, unless another time is requested."""
        first = wanted.first_step if wanted.first_step is not None else int(time.time()) - _DAY_S
        last = wanted.last_step if wanted.last_step is not None else int(time.time())
        chosen = Wanted((node_owner(node),), wanted.keys, first_step=first, last_step=last, bins=wanted.bins)
        return await self.metrics.curves(chosen)

    async def job_keys(self, jobs: Sequence[int]) -> list[KeySummary]:
        """Without what ``ugro.train`` writes for itself."""
        found = await self.metrics.keys(Wanted(tuple(job_owner(job) for job in jobs)))
        return [one for one in found if not is_internal(one.key)]

    async def measured(self, job: int, attempt: int) -> Measured:
        """What is known of a job's metrics, up to that attempt; files that have just arrived are read first."""
        with contextlib.suppress(TimeoutError, UgroError, OSError):  # a very large file; the rest is read later
            async with asyncio.timeout(_CATCH_UP_S):
                await self._collector.collect(job)
        figures = (await self.metrics.figures([job], attempt)).get(job, {})
        means = await self.metrics.means(job, [name for name in figures if is_averaged(name)], attempt)
        return Measured(figures, means, (await self.metrics.parameters([job])).get(job, {}))

    def grown_since(self, count: int) -> tuple[int, list[int]]:
        """The count to pass the next time, and the jobs whose metrics have grown since this one."""
        return self.grown.count, [job for job, at in self._grown.items() if at > count]

    def _grown_before(self, ago_s: float) -> int:
        """The count as of so long ago, or a little later."""
        then = time.monotonic() - ago_s
        while self._grown_lately and self._grown_lately[0][0] < then:
            self._grown_lately.popleft()
        return self._grown_lately[0][1] if self._grown_lately else self.grown.count

    @answers(TestChannels)
    async def test(self, asked: TestChannels, caller: Caller) -> TriedChannels:
        chosen = asked.channels or (LOG, *self._cluster.config.channels)
        name = self._cluster.config.cluster.name
        message = Message("this is a test", "info", "test", time.time(), name, "Somebody ran: ugro alerts test")
        return TriedChannels(tuple(await asyncio.gather(*(self._try(one, message) for one in chosen))))

    async def changes(self, after: int | None) -> AsyncGenerator[list[Change]]:
        """Events after that number, or from now on; node reports, at first all; and the jobs whose metrics have grown.

        Each line has the number of the last event before it. Only events are numbered: a client that reconnects gets
        all reports first.
        """
        monitor, moved = self.monitor, self.live.changed
        after = await self._store.ends.newest() if after is None else after
        shown: dict[str, NodeReport] = {}
        # A page listens a while after it was made: what has grown meanwhile is told again.
        seen_grown = self._grown_before(_PAGE_S)
        while not self._is_ending:
            seen = {signal: signal.count for signal in (monitor.changed, moved, self.grown)}
            lines: list[Change] = []
            if events := await self._store.jobs.events(after=after):
                after = events[-1].seq
                hidden = await self._store.visibility.hidden_from(viewer())
                lines += [{"cursor": event.seq, "event": event} for event in events if event.job not in hidden]
            if news := _news_of_nodes(shown, monitor.reports):
                lines.append({"cursor": after, **news})  # type: ignore[typeddict-item]  # some of its keys
            seen_grown, jobs = self.grown_since(seen_grown)
            if grown := set(jobs) - await self._store.visibility.hidden_from(viewer()):
                lines.append({"cursor": after, "metrics": sorted(grown)})
            if lines:
                yield lines
            else:
                await wait_for_any(seen, _LOOK_S)
        raise agent_stops()

    # --- helpers -----------------------------------------------------------------------------------------------

    async def _try(self, name: str, message: Message) -> Tried:
        try:
            await self.notifier.test(name, message)
        except UgroError as error:
            return Tried(name, error.message, error.hint)
        return Tried(name)

    async def _note_work(self) -> None:
        moved = self.live.changed
        while True:
            seen = moved.count
            await moved.wait(seen)
            self._rounds.has_worked()

    def _note_grown(self, owners: frozenset[str]) -> None:
        jobs = [int(owner.removeprefix(JOB)) for owner in owners if owner.startswith(JOB)]
        if jobs:
            self._grown_lately.append((time.monotonic(), self.grown.count))
            self._grown_before(_PAGE_S)
            self.grown.notify()
            self._grown |= dict.fromkeys(jobs, self.grown.count)


@dataclass(frozen=True, slots=True)
class _Parts:
    notifications: JobNotifications
    ingest: MetricsIngest
    prometheus: PrometheusMetrics


def _news_of_nodes(shown: dict[str, NodeReport], reports: dict[str, NodeReport]) -> dict[str, Any]:
    """Only the reports that have changed: a cluster of a hundred nodes reports a hundred times in five seconds."""
    fresh = [report for name, report in reports.items() if shown.get(name) is not report]
    gone = [name for name in shown if name not in reports]
    shown.clear()
    shown.update(reports)
    return ({"nodes": fresh} if fresh else {}) | ({"gone_nodes": gone} if gone else {})


def _price(cluster: Cluster) -> Price:
    energy = cluster.config.section(EnergySection)
    return Price(energy.price_per_kwh, energy.currency)


def ranks_by(live: LiveJobs, watch: RunTracker, node: str) -> Ranks:
    """How many ranks running jobs should have on a node, and how many the node reports."""
    running = [job for job in live.holding() if job.state is JobState.RUNNING]
    reached = ((job, name) for job in running for name in (job.placement.nodes if job.placement else ()))
    states = [watch.state(name, job.id, job.attempt).state for job, name in reached if node_of(name) == node]
    # A node that has finished its part waits for the others of its job: nothing is missing there.
    expected = [state for state in states if state is not RunState.DONE]
    return Ranks(len(expected), sum(state in _ALIVE for state in expected))
