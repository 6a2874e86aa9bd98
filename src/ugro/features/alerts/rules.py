"""Alerts: what is wrong with the nodes (``findings``), and which notices to send about it (``review``).

An alert starts when a problem was seen in two checks in a row, and clears when two checks in a row did not see it: one
check that differs means little, since links break and values swing. A notice is repeated at most hourly, and sent at
once when the alert gets worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ugro.features.alerts.model import Alert, Key, Severity
from ugro.kernel.agent.model import Finding as DoctorFinding
from ugro.kernel.agent.model import Grade
from ugro.kernel.links.model import NodeReport, Status

CLUSTER = ""  # the subject of an alert that is about all nodes
_LOOKS = 2


_RANK = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A threshold is crossed when a value is beyond it."""

    score_warning: float = 70.0
    score_critical: float = 50.0
    gpu_temperature_warning: float = 80.0
    gpu_temperature_critical: float = 85.0
    memory_warning: float = 0.90
    memory_critical: float = 0.95
    unhealthy_nodes: float = 0.5
    repeat_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    node: str  # CLUSTER: all of them
    severity: Severity
    text: str

    @property
    def key(self) -> Key:
        return self.rule, self.node


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to send about an alert or a change of status."""

    kind: str  # started, worse, repeated, cleared or changed
    severity: Severity
    rule: str
    node: str
    text: str
    at: float


@dataclass(frozen=True, slots=True)
class Review:
    alerts: tuple[Alert, ...]  # to be stored
    notices: tuple[Notice, ...]


# --- what is wrong ---------------------------------------------------------------------------------------------------


def findings(reports: Sequence[NodeReport], limits: Thresholds, looked_at: frozenset[str]) -> list[Finding]:
    """For the nodes that were checked, and for the whole cluster if CLUSTER is among them. Each machine counts once."""
    reports = [report for report in reports if report.same_as is None]
    checked = [report for report in reports if report.name in looked_at]
    found = [finding for report in checked if not report.status.is_asleep for finding in _of_node(report, limits)]
    found += [finding for report in checked for finding in _of_power(report)]
    return [*found, *(_of_cluster(reports, limits) if CLUSTER in looked_at else ())]


def own_disk(found: DoctorFinding | None) -> list[Finding]:
    """``found``: what is wrong with the disk of the agent's state."""
    if found is None:
        return []
    severity = Severity.CRITICAL if found.grade is Grade.FAILED else Severity.WARNING
    return [Finding("agent-disk", CLUSTER, severity, f"{found.text}; {found.remedy}")]


def slower(report: NodeReport, texts: Sequence[str]) -> list[Finding]:
    """``texts``: what was measured to be worse than before on this node."""
    if not texts or report.same_as is not None:
        return []
    return [Finding("measured", report.name, Severity.WARNING, f"{report.name}: {'; '.join(texts)}")]


def status_change(before: NodeReport | None, after: NodeReport, now: float) -> Notice | None:
    if before is None or before.status is after.status or after.same_as is not None:
        return None
    text = f"{after.name} was {before.status} and is {after.status}"
    why = after.error or "; ".join(reason.text for reason in after.reasons)
    if after.status.is_asleep and after.power is not None:
        why = after.power.reason
    return Notice("changed", Severity.INFO, "status", after.name, f"{text}: {why}" if why else text, now)


def _of_node(report: NodeReport, limits: Thresholds) -> Iterator[Finding]:
    if report.status is Status.UNREACHABLE:
        yield Finding("unreachable", report.name, Severity.CRITICAL, f"{report.name} is unreachable: {report.error}")
        return
    reasons = "; ".join(reason.text for reason in report.reasons) or "no single cause"
    text = f"{report.name} has a health score of {report.score}: {reasons}"
    yield from _below("score", report, report.score, (limits.score_warning, limits.score_critical), text)
    if report.facts is None:
        return
    warm = (limits.gpu_temperature_warning, limits.gpu_temperature_critical)
    for gpu in report.facts.gpus:
        if gpu.temperature_c is not None:
            hot = f"GPU {gpu.index} of {report.name} is at {gpu.temperature_c:.0f} °C"
            yield from _above(f"gpu{gpu.index}-temperature", report, gpu.temperature_c, warm, hot)
    used = report.facts.memory_used_ratio
    full = f"{report.name} has {used * 100:.1f} % of its memory used"
    yield from _above("memory", report, used, (limits.memory_warning, limits.memory_critical), full)
    for reason in report.reasons:
        if reason.part == "processes":
            yield Finding("no-rank", report.name, Severity.WARNING, f"{report.name}: {reason.text}")


def _of_power(report: NodeReport) -> Iterator[Finding]:
    """That it sleeps is no problem; that it does not wake is one."""
    if report.power is not None and report.power.problem:
        yield Finding("power", report.name, Severity.WARNING, f"{report.name}: {report.power.problem}")


def _of_cluster(reports: Sequence[NodeReport], limits: Thresholds) -> Iterator[Finding]:
    bad = [report.name for report in reports if report.status in (Status.UNHEALTHY, Status.UNREACHABLE)]
    if reports and len(bad) / len(reports) > limits.unhealthy_nodes:
        text = f"{len(bad)} of {len(reports)} nodes are unhealthy or unreachable: {', '.join(sorted(bad)[:10])}"
        yield Finding("unhealthy-nodes", CLUSTER, Severity.CRITICAL, text)


def _above(
    rule: str, report: NodeReport, value: float, limits: tuple[float, float], text: str
) -> Iterator[Finding]:
    warning, critical = limits
    if value > critical or value > warning:
        yield Finding(rule, report.name, Severity.CRITICAL if value > critical else Severity.WARNING, text)


def _below(
    rule: str, report: NodeReport, value: float, limits: tuple[float, float], text: str
) -> Iterator[Finding]:
    warning, critical = limits
    if value < critical or value < warning:
        yield Finding(rule, report.name, Severity.CRITICAL if value < critical else Severity.WARNING, text)


# --- which notices to send ------------------------------------------------------------------------------------------


def review(
    known: Mapping[Key, Alert], found: Iterable[Finding], looked_at: frozenset[str], now: float, repeat_s: float
) -> Review:
    """``looked_at``: the nodes that were checked, and CLUSTER; alerts about others stay as they are."""
    alerts: dict[Key, Alert] = {}
    notices: list[Notice] = []
    new = {finding.key: finding for finding in found}
    for key in [*known, *(key for key in new if key not in known)]:
        if key[1] not in looked_at:
            alerts[key] = known[key]
            continue
        alert, notice = _seen(known.get(key), new[key], now, repeat_s) if key in new else _unseen(known[key], now)
        if alert is not None:
            alerts[key] = alert
        if notice is not None:
            notices.append(notice)
    return Review(tuple(alerts.values()), tuple(notices))


def forget_nodes(known: Iterable[Alert], members: frozenset[str], now: float) -> tuple[Notice, ...]:
    """Clears the alerts of nodes that left the cluster."""
    return tuple(
        _notice("cleared", Severity.INFO, alert, f"{alert.node} is no longer in the cluster: {alert.text}", now)
        for alert in known
        if alert.node != CLUSTER and alert.node not in members and alert.started_at is not None
    )


def is_wanted(notice: Notice, before: Alert | None, least: Severity) -> bool:
    """Whether to send it. The end of an alert is sent if its worst severity was."""
    weight = before.worst if before is not None and notice.kind == "cleared" else notice.severity
    return _RANK[weight] >= _RANK[least]


def worst_first(alerts: Iterable[Alert]) -> list[Alert]:
    """Active alerts, by severity, then by age."""
    found = [alert for alert in alerts if alert.started_at is not None]
    return sorted(found, key=lambda alert: (-_RANK[alert.severity], alert.started_at))


def shifted(alert: Alert, by_s: float) -> Alert:
    """After this machine's clock was set: the same times by the new one."""
    return replace(
        alert,
        first_seen_at=alert.first_seen_at + by_s,
        started_at=None if alert.started_at is None else alert.started_at + by_s,
        told_at=None if alert.told_at is None else alert.told_at + by_s,
    )


def _seen(old: Alert | None, finding: Finding, now: float, repeat_s: float) -> tuple[Alert, Notice | None]:
    before = old or Alert(finding.rule, finding.node, finding.severity, finding.text, now)
    alert = replace(before, severity=finding.severity, text=finding.text, seen=before.seen + 1, unseen=0)
    kind = _occasion(before, alert, now, repeat_s)
    if kind is None:
        return alert, None
    started_at = alert.started_at if alert.started_at is not None else now
    worst = max(alert.worst, alert.severity, key=_RANK.__getitem__)
    alert = replace(alert, started_at=started_at, told_at=now, worst=worst)
    return alert, _notice(kind, alert.severity, alert, alert.text, now)


def _occasion(before: Alert, alert: Alert, now: float, repeat_s: float) -> str | None:
    if before.started_at is None:
        return "started" if alert.seen >= _LOOKS else None
    if _RANK[alert.severity] > _RANK[before.worst]:
        return "worse"
    # A notice of the future was sent by a clock that has been set back since.
    is_due = before.told_at is None or not 0 <= now - before.told_at < repeat_s
    return "repeated" if is_due else None


def _unseen(old: Alert, now: float) -> tuple[Alert | None, Notice | None]:
    if old.started_at is None:
        return None, None
    if old.unseen + 1 < _LOOKS:
        return replace(old, seen=0, unseen=old.unseen + 1), None
    return None, _notice("cleared", Severity.INFO, old, f"over: {old.text}", now)


def _notice(kind: str, severity: Severity, alert: Alert, text: str, now: float) -> Notice:
    return Notice(kind, severity, alert.rule, alert.node, text, now)
