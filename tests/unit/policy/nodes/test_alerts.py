"""What is wrong with nodes, and when somebody is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from ugro.features.alerts.model import Alert, Key, Severity
from ugro.features.alerts.rules import (
    CLUSTER,
    Finding,
    Notice,
    Thresholds,
    findings,
    forget_nodes,
    is_wanted,
    own_disk,
    review,
    shifted,
    slower,
    status_change,
    worst_first,
)
from ugro.features.health.rules import DiskRoom, judge_disk
from ugro.features.power.model import PowerReport, PowerState
from ugro.kernel.agent.model import Grade
from ugro.kernel.links.model import Facts, Gpu, NodeReport, Reason, Status

GIB = 2**30
MIB = 2**20
HOUR = 3600.0


def test_the_disk_of_the_agent_is_judged_by_what_is_free_and_is_an_alert_of_the_cluster() -> None:
    def room(free: int, kept: int = 16 * MIB) -> DiskRoom:
        return DiskRoom("/home/ann/.ugro", free, kept, 16 * MIB, 32 * MIB, 256 * MIB)

    assert judge_disk(room(256 * MIB)) is None
    assert own_disk(None) == []
    little, full = judge_disk(room(255 * MIB)), judge_disk(room(0, 3 * MIB))
    assert little is not None
    assert full is not None
    assert (little.subject, little.grade, full.grade) == ("this machine", Grade.WARNING, Grade.FAILED)
    assert little.text == (
        "the disk of /home/ann/.ugro is nearly full: 255.0 MiB free. Results stay on the nodes until 256.0 MiB are"
    )
    assert "is full: 0 B free" in full.text
    assert "for which 3.0 MiB of 16.0 MiB are kept" in full.text
    assert "ugro results JOB --rm" in (full.remedy or "")
    [alert], [warning] = own_disk(full), own_disk(little)
    assert alert.key == warning.key == ("agent-disk", CLUSTER)
    assert (alert.severity, warning.severity) == (Severity.CRITICAL, Severity.WARNING)
    assert full.text in alert.text
    assert "du -sh /home/ann/.ugro/*" in alert.text


def report(
    name: str = "gpu1",
    *,
    score: int = 100,
    status: Status = Status.HEALTHY,
    temperature_c: float = 50,
    memory: float = 0.5,
    reasons: tuple[Reason, ...] = (),
) -> NodeReport:
    gpu = Gpu(0, "u", "RTX 4070", temperature_c=temperature_c)
    facts = Facts(0, 0, (0, 0, 0), 0.1, 100 * GIB, round((1 - memory) * 100 * GIB), gpus=(gpu,))
    is_away = status is Status.UNREACHABLE
    return NodeReport(
        name, status, score, reasons, facts=None if is_away else facts, error="login refused" if is_away else None
    )


def found(*reports: NodeReport) -> dict[str, Severity]:
    everyone = frozenset({CLUSTER, *(report.name for report in reports)})
    return {finding.rule: finding.severity for finding in findings(reports, Thresholds(), everyone)}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (report(), {}),
        (report(score=70), {}),
        (report(score=69), {"score": Severity.WARNING}),
        (report(score=50), {"score": Severity.WARNING}),
        (report(score=49), {"score": Severity.CRITICAL}),
        (report(temperature_c=80), {}),
        (report(temperature_c=80.5), {"gpu0-temperature": Severity.WARNING}),
        (report(temperature_c=85.5), {"gpu0-temperature": Severity.CRITICAL}),
        (report(memory=0.9), {}),
        (report(memory=0.91), {"memory": Severity.WARNING}),
        (report(memory=0.96), {"memory": Severity.CRITICAL}),
        (report(reasons=(Reason("processes", "no rank process", 10),)), {"no-rank": Severity.WARNING}),
    ],
)
def test_each_rule_has_its_own_limits(seen: NodeReport, expected: dict[str, Severity]) -> None:
    assert found(seen, report("gpu2")) == expected


def test_more_than_half_of_the_nodes_must_be_bad_for_the_cluster_to_be() -> None:
    bad, good = report("a", status=Status.UNREACHABLE), report("b")
    assert "unhealthy-nodes" not in found(bad, good)
    assert found(bad, report("c", status=Status.UNHEALTHY), good)["unhealthy-nodes"] is Severity.CRITICAL
    assert found() == {}


def test_a_node_that_is_away_is_critical_and_nothing_else_is_said_of_it() -> None:
    reports = [report(status=Status.UNREACHABLE, score=0), report("b")]
    [finding] = findings(reports, Thresholds(), frozenset({"gpu1", "b", CLUSTER}))
    assert (finding.rule, finding.severity) == ("unreachable", Severity.CRITICAL)
    assert finding.text == "gpu1 is unreachable: login refused"


def test_a_node_that_sleeps_is_no_alert_and_one_that_does_not_wake_is() -> None:
    asleep = NodeReport("gpu1", Status.ASLEEP, 100, power=PowerReport(PowerState.ASLEEP, 60.0, "suspended"))
    looked_at = frozenset({"gpu1", CLUSTER})
    assert findings([asleep], Thresholds(), looked_at) == []
    sick = replace(asleep, power=PowerReport(PowerState.ASLEEP, 1.0, problem="it did not wake within 5m"))
    assert findings([sick], Thresholds(), looked_at) == [
        Finding("power", "gpu1", Severity.WARNING, "gpu1: it did not wake within 5m")
    ]
    change = status_change(report(), asleep, 5.0)
    assert change is not None
    assert change.text == "gpu1 was healthy and is asleep: suspended"


def test_hardware_that_became_slower_is_a_warning_on_the_name_that_is_used() -> None:
    [one] = slower(report("gpu1"), ["GPU 0 bf16: low", "storage: low"])
    assert (one.rule, one.node, one.severity) == ("measured", "gpu1", Severity.WARNING)
    assert one.text == "gpu1: GPU 0 bf16: low; storage: low"
    assert slower(report("gpu1"), []) == []


def test_only_what_was_looked_at_is_judged() -> None:
    reports = [report("a", status=Status.UNREACHABLE), report("b", score=10), report("c", status=Status.UNREACHABLE)]
    for looked_at in ({"a"}, {"b"}, {CLUSTER}, {"a", CLUSTER}, set[str]()):
        assert {one.node for one in findings(reports, Thresholds(), frozenset(looked_at))} == looked_at


@dataclass
class Watch:
    """Looks, one after the other, and what they led to."""

    known: dict[Key, Alert] = field(default_factory=dict)

    def look(self, now: float, *seen: Finding, nodes: Sequence[str] = ("gpu1",)) -> list[str]:
        return [notice.kind for notice in self.notices(now, *seen, nodes=nodes)]

    def notices(self, now: float, *seen: Finding, nodes: Sequence[str] = ("gpu1",)) -> tuple[Notice, ...]:
        made = review(self.known, seen, frozenset(nodes), now, HOUR)
        self.known = {alert.key: alert for alert in made.alerts}
        return made.notices


WARM = Finding("gpu0-temperature", "gpu1", Severity.WARNING, "GPU 0 of gpu1 is at 82 °C")
HOT = Finding("gpu0-temperature", "gpu1", Severity.CRITICAL, "GPU 0 of gpu1 is at 87 °C")


def test_an_alert_starts_at_the_second_look_and_only_once() -> None:
    watch = Watch()
    assert [watch.look(now, WARM) for now in (0, 5, 10, 15, 20)] == [[], ["started"], [], [], []]


def test_a_single_bad_look_is_no_alert() -> None:
    watch = Watch()
    assert [watch.look(0, WARM), watch.look(5), watch.look(10, WARM), watch.look(15)] == [[], [], [], []]
    assert watch.known == {}


def test_what_goes_on_is_told_again_once_an_hour() -> None:
    watch = Watch()
    told = [now for now in range(0, 3 * 3600 + 10, 5) if watch.look(now, WARM)]
    assert told == [5, 3605, 7205, 10805]


def test_a_clock_that_is_set_changes_nothing_about_when_a_notice_is_repeated() -> None:
    watch = Watch()
    assert [watch.look(now, WARM) for now in (10_000, 10_005)] == [[], ["started"]]
    watch.known = {key: shifted(alert, -7200.0) for key, alert in watch.known.items()}
    told = [now for now in range(10_010, 10_010 + 2 * 3600, 5) if watch.look(now - 7200, WARM)]
    assert told == [13_605, 17_205]


def test_a_notice_of_the_future_does_not_silence_an_alert_until_then() -> None:
    watch = Watch()
    assert [watch.look(now, WARM) for now in (10_000, 10_005)] == [[], ["started"]]
    told = [now for now in range(2000, 2000 + 4000, 5) if watch.look(now, WARM)]
    assert told == [2000, 5600], "as after a restart with a clock that was set back meanwhile"


def test_what_gets_worse_is_told_at_once_and_what_swings_is_not_told_at_every_turn() -> None:
    watch = Watch()
    told = [watch.look(now, finding) for now, finding in enumerate([WARM, WARM, HOT, WARM, HOT, WARM, HOT])]
    assert told == [[], ["started"], ["worse"], [], [], [], []]


def test_it_clears_with_an_info_when_it_was_not_seen_twice() -> None:
    watch = Watch()
    for now in (0, 5):
        watch.look(now, HOT)
    assert watch.look(10) == []
    assert watch.look(15, HOT) == []  # it was never over
    assert watch.look(20) == []
    assert [alert.started_at for alert in watch.known.values()] == [5]
    [notice] = watch.notices(25)
    assert (notice.kind, notice.severity, notice.at) == ("cleared", Severity.INFO, 25)
    assert watch.known == {}
    assert [watch.look(30, HOT), watch.look(35, HOT)] == [[], ["started"]]


def test_a_look_at_one_node_says_nothing_of_another() -> None:
    watch = Watch()
    for now in (0, 5):
        watch.look(now, WARM)
    for now in (10, 15, 20):
        assert watch.look(now, nodes=("gpu2", CLUSTER)) == []
    assert len(watch.known) == 1


def test_an_alert_that_an_agent_before_us_told_is_not_started_again() -> None:
    watch = Watch()
    watch.look(0, HOT)
    watch.look(5, HOT)
    remembered = Alert(HOT.rule, HOT.node, HOT.severity, HOT.text, 0, 5, 5, Severity.CRITICAL)
    later = Watch({remembered.key: remembered})
    assert [later.look(now, HOT) for now in (100, 105, 110)] == [[], [], []]


def test_a_node_that_left_the_cluster_takes_its_alerts_along() -> None:
    watch = Watch()
    for now in (0, 5):
        watch.look(now, HOT)
    [notice] = forget_nodes(watch.known.values(), frozenset({"gpu2"}), 10)
    assert (notice.kind, notice.node) == ("cleared", "gpu1")
    assert forget_nodes(watch.known.values(), frozenset({"gpu1"}), 10) == ()


def test_a_change_of_status_is_an_info_with_its_reason() -> None:
    away = report(status=Status.UNREACHABLE)
    assert status_change(None, away, 1) is None
    assert status_change(away, away, 1) is None
    notice = status_change(report(), away, 1)
    assert notice is not None
    assert (notice.severity, notice.text) == (Severity.INFO, "gpu1 was healthy and is unreachable: login refused")


@pytest.mark.parametrize("least", list(Severity))
def test_who_heard_of_an_alert_hears_of_its_end(least: Severity) -> None:
    watch = Watch()
    watch.look(0, WARM)
    [started] = watch.notices(5, WARM)
    [worse] = watch.notices(10, HOT)
    watch.look(15)
    before = watch.known[HOT.key]
    [cleared] = watch.notices(20)
    assert cleared.severity is Severity.INFO
    assert is_wanted(started, None, least) is (least is not Severity.CRITICAL)
    assert is_wanted(worse, before, least)
    assert is_wanted(cleared, before, least)
    assert is_wanted(cleared, None, least) is (least is Severity.INFO)


def test_the_worst_alert_is_first_then_the_oldest_and_what_was_seen_once_is_none_yet() -> None:
    def alert(node: str, severity: Severity, started_at: float | None) -> Alert:
        return Alert("score", node, severity, "", 0, started_at)

    alerts = [
        alert("a", Severity.WARNING, 1),
        alert("b", Severity.CRITICAL, 9),
        alert("c", Severity.CRITICAL, 3),
        alert("d", Severity.CRITICAL, None),
    ]
    assert [one.node for one in worst_first(alerts)] == ["c", "b", "a"]
