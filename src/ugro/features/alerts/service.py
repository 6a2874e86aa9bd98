"""The monitor turns node reports into metrics, alerts and notifications.

It sets the interval at which ``kernel.links.reports`` asks each node, and pauses for a node that keeps failing. Jobs
never wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ugro.features.alerts import rules
from ugro.features.alerts.channels import Message, Notifier
from ugro.features.alerts.config import LOG, AlertSection
from ugro.features.alerts.model import Alert, Key, Severity
from ugro.features.alerts.operations import AlertList, ListAlerts
from ugro.features.alerts.rules import CLUSTER, Notice
from ugro.features.alerts.store import AlertStore
from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import Finding
from ugro.kernel.agent.rules import Jump
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.store import End
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import NodeReport, Status
from ugro.kernel.links.node import Node
from ugro.kernel.links.reports import NodeReports
from ugro.kernel.links.rules import Breaker, BreakerState, Pace, Poll, poll
from ugro.kernel.links.rules import Limits as BreakerLimits
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import unix_seconds
from ugro.kernel.support.quantities import format_duration
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.metricstore import Limits, MetricStore, samples

# --- job notifications ------------------------------------------------------------------------------------------------
# Notifications that a job has ended, to the log and to the channels that the job names in ``notify``.
#
# The position in the events is kept on disk, so an end is reported even if the agent died or was stopped right after
# it.


log = logging.getLogger(__name__)

_LOOK_S = 5.0
_GATHER_S = 0.25


class JobNotifications:
    def __init__(self, store: Store, cluster: Cluster, notifier: Notifier, moved: ChangeSignal) -> None:
        self._store = store
        self._cluster = cluster
        self._notifier = notifier
        self._moved = moved
        self._place = 0

    async def run(self) -> None:
        self._place = await self._store.alerts.notified_until()
        while True:
            seen = self._moved.count
            try:
                await self._send_new()
            except UgroError as error:
                log.error("cannot send notifications about ended jobs: %s", error)
            await self._moved.wait(seen, _LOOK_S)
            await asyncio.sleep(_GATHER_S)  # jobs that end together are handled together

    async def _send_new(self) -> None:
        while ends := await self._store.ends.after(self._place):
            for end in ends:
                log.info("%s %s: %s", end.name, end.state, end.reason, extra={"job": end.job, "attempt": end.attempt})
                if end.has_notify:
                    job = await self._store.jobs.get(end.job)
                    self._notifier.tell(job.spec.notify, message_of(job, end, self._cluster.config.cluster.name))
                self._place = end.seq  # even if it cannot be recorded: nothing is sent twice
            await self._store.alerts.set_notified_until(self._place)


def message_of(job: Job, end: End, cluster: str) -> Message:
    after = ""
    if end.lasted_s is not None:
        after = f" after {format_duration(end.lasted_s)}"
    nodes = f"on {', '.join(job.placement.node_names)}; " if job.placement else ""
    return Message(
        title=f"job {job.id} {job.spec.name} {end.state}{after}",
        severity="warning" if end.state is JobState.FAILED else "info",
        kind="job",
        at=unix_seconds(end.at),
        cluster=cluster,
        detail=f"{end.reason}\n{nodes}attempt {end.attempt}; see: ugro why {job.id}",
        state=end.state,
        job=job.id,
        attempt=end.attempt or None,
    )


# --- monitor ----------------------------------------------------------------------------------------------------------


_TIDY_S = 600.0
_TIDY_FIRST_S = 60.0
_MOST_WAITING = 10_000  # reports; more only if the disk hangs


@dataclass(frozen=True, slots=True)
class Watched:
    """How a node is probed."""

    name: str
    breaker: BreakerState
    failures: int
    reason: str
    interval_s: float
    interval_reason: str


class Rounds:
    """How often each node is asked; one that keeps failing is left alone for a while."""

    def __init__(self, cluster: Cluster, live_jobs: Callable[[], int]) -> None:
        self._cluster = cluster
        self._live_jobs = live_jobs
        self._breakers: dict[str, Breaker] = {}
        self._worked_at = time.monotonic()

    def has_worked(self) -> None:
        """Some job has changed."""
        self._worked_at = time.monotonic()

    def pause_s(self, node: Node) -> float | None:
        """After how many seconds a node is asked again; None: not until its link is back."""
        now = time.monotonic()
        breaker = self._breaker(node.spec.name)
        if breaker.state(now, self._limits, alive_since=node.alive_since) is BreakerState.OPEN:
            return None
        return self._poll(node.spec.name).interval_s

    def watched(self, node: Node) -> Watched:
        name, now = node.spec.name, time.monotonic()
        known, asked = self._breaker(name), self._poll(name)
        state = known.state(now, self._limits, alive_since=node.alive_since)
        reason = known.reason(now, self._limits)
        return Watched(name, state, known.failures, reason, asked.interval_s, asked.reason)

    def note(self, reports: list[NodeReport]) -> None:
        now = time.monotonic()
        for report in reports:
            has_answered = report.status is not Status.UNREACHABLE
            before = self._breaker(report.name)
            after = self._breakers[report.name] = before.after(has_answered, now, self._limits)
            if (before.opened_at is None) != (after.opened_at is None):
                word = "answers again" if has_answered else f"is not probed: {after.reason(now, self._limits)}"
                log.warning("%s", word, extra={"node": report.name})

    def forget(self, node: str) -> None:
        self._breakers.pop(node, None)

    def _poll(self, name: str) -> Poll:
        settings = self._cluster.config.monitor
        pace = Pace(settings.busy_interval, settings.recent_interval, settings.quiet_interval, settings.idle_interval)
        idle_s = time.monotonic() - self._worked_at
        return poll(pace, jobs=self._live_jobs(), idle_s=idle_s, failures=self._breaker(name).failures)

    @property
    def _limits(self) -> BreakerLimits:
        settings = self._cluster.config.monitor
        return BreakerLimits(settings.breaker_failures, settings.breaker_pause)

    def _breaker(self, name: str) -> Breaker:
        return self._breakers.get(name, _FRESH)


@dataclass(frozen=True, slots=True)
class Sources:
    """What the monitor hears of nodes."""

    node_reports: NodeReports
    rounds: Rounds
    own_disk: Callable[[], Finding | None]  # what is wrong with that of the state. Blocks
    slower: Callable[[str], Sequence[Finding]]  # what was measured to be worse on a node
    may_remove: Callable[[], bool]  # whether this machine's clock is to be believed


class Monitor:
    def __init__(
        self, cluster: Cluster, sources: Sources, store: AlertStore, metrics: MetricStore, notifier: Notifier
    ) -> None:
        self.changed = ChangeSignal()  # a new report of some node
        self.reports: dict[str, NodeReport] = {}  # the newest of each
        self._cluster = cluster
        self._sources = sources
        self._rounds = sources.rounds
        self._store = store
        self._metrics = metrics
        self._notifier = notifier
        self._alerts: dict[Key, Alert] = {}
        self._judged: dict[str, NodeReport] = {}  # the newest of each whose alerts are on disk
        self._seen: list[tuple[float, NodeReport]] = []
        self._news = ChangeSignal()
        self._cluster_at = float("-inf")
        self._tidied_at = time.monotonic() - _TIDY_S + _TIDY_FIRST_S
        sources.node_reports.listen(self._note)

    @answers(ListAlerts)
    async def list_alerts(self, asked: ListAlerts, caller: Caller) -> AlertList:
        history = await self._store.history(asked.limit)
        return AlertList(tuple(self.alerts()), tuple(history))

    def alerts(self) -> list[Alert]:
        """The active alerts, the worst first."""
        return rules.worst_first(self._alerts.values())

    def watched(self) -> list[Watched]:
        return [self._rounds.watched(node) for node in self._cluster.inventory]

    def clock_was_set(self, jump: Jump) -> None:
        """Notices are repeated as if it had not been."""
        self._alerts = {key: rules.shifted(alert, jump.by_s) for key, alert in self._alerts.items()}

    async def run(self) -> None:
        self._alerts = await self._store.on()
        while True:
            seen = self._news.count
            await self._look()
            await self._news.wait(seen, _TIDY_FIRST_S)

    def _note(self, reports: list[NodeReport]) -> None:
        self._rounds.note(reports)
        if len(self._seen) < _MOST_WAITING:
            self._seen += [(time.time(), report) for report in reports]
        self._news.notify()

    # --- what becomes of reports ---------------------------------------------------------------------------------

    async def _look(self) -> None:
        seen, self._seen = self._seen, []
        await _noted(self._metrics.append(_points(seen)))
        for now, report in seen:
            await _noted(self._take_in(now, report))
        await _noted(self._forget_strangers())
        await _noted(self._tidy_when_due())
        if seen:
            self.changed.notify()

    async def _take_in(self, now: float, report: NodeReport) -> None:
        self.reports[report.name] = report
        members = {node.spec.name for node in self._cluster.inventory}
        looked_at = frozenset({report.name})
        if time.monotonic() - self._cluster_at >= self._cluster.config.monitor.busy_interval * 0.9:
            looked_at |= {CLUSTER}
            self._cluster_at = time.monotonic()
        everyone = [known for name, known in self.reports.items() if name in members]
        found = rules.findings(everyone, self._thresholds, looked_at)
        if CLUSTER in looked_at:
            found += rules.own_disk(await asyncio.to_thread(self._sources.own_disk))
        found += rules.slower(report, [finding.text for finding in self._sources.slower(report.name)])
        review = rules.review(self._alerts, found, looked_at, now, self._thresholds.repeat_s)
        change = rules.status_change(self._judged.get(report.name), report, now)
        await self._decided(review.alerts, (*([change] if change else ()), *review.notices))
        self._judged[report.name] = report

    async def _decided(self, now_on: tuple[Alert, ...], notices: tuple[Notice, ...]) -> None:
        """Recorded before notifications are sent, so that a restarted agent does not send them again.

        If it cannot be recorded, the next report leads to the same decision.
        """
        if notices:
            await self._store.record(now_on, notices)
        before, self._alerts = self._alerts, {alert.key: alert for alert in now_on}
        for notice in notices:
            self._notify(notice, before.get((notice.rule, notice.node)))

    async def _forget_strangers(self) -> None:
        members = frozenset(node.spec.name for node in self._cluster.inventory)
        gone = [name for name in self.reports if name not in members]
        notices = rules.forget_nodes(self._alerts.values(), members, time.time())
        if gone or notices:
            for name in gone:
                del self.reports[name]
                self._judged.pop(name, None)
                self._rounds.forget(name)
            kept = tuple(one for one in self._alerts.values() if one.node == CLUSTER or one.node in members)
            await self._decided(kept, notices)

    async def _tidy_when_due(self) -> None:
        if time.monotonic() - self._tidied_at < _TIDY_S:
            return
        self._tidied_at = time.monotonic()
        settings = self._cluster.config.metrics
        limits = Limits(settings.node_hours, settings.job_days, round(settings.max_gb * 10**9))
        for owner in await self._metrics.keep_within(limits, time.time() if self._sources.may_remove() else None):
            log.info("old metrics of %s were removed", owner)

    @property
    def _thresholds(self) -> rules.Thresholds:
        settings = self._cluster.config.section(AlertSection)
        return rules.Thresholds(
            settings.score_warning, settings.score_critical, settings.gpu_temperature_warning,
            settings.gpu_temperature_critical, settings.memory_warning, settings.memory_critical,
            settings.unhealthy_nodes, settings.repeat,
        )  # fmt: skip

    def _notify(self, notice: Notice, before: Alert | None) -> None:
        settings = self._cluster.config.section(AlertSection)
        is_wanted = rules.is_wanted(notice, before, Severity(settings.least))
        message = Message(
            title=notice.text,
            severity=notice.severity,
            kind="alert",
            at=notice.at,
            cluster=self._cluster.config.cluster.name,
            state=notice.kind,
            node=notice.node or None,
            rule=notice.rule,
            detail="see: ugro health" if notice.node == CLUSTER else f"see: ugro health {notice.node}",
        )
        self._notifier.tell((LOG, *(settings.channels if is_wanted else ())), message)


async def _noted(work: Awaitable[None]) -> None:
    """Logs an error, as on a full disk, so that the other steps still run."""
    try:
        await work
    except UgroError as error:
        log.error("cannot record node reports: %s", error)


def _points(seen: list[tuple[float, NodeReport]]) -> dict[SeriesKey, Points]:
    points: dict[SeriesKey, Points] = {}
    for now, report in seen:
        for key, some in samples(report, now).items():
            points.setdefault(key, Points()).extend(some)
    return points


_FRESH = Breaker()
