from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.serving.places import job, ready, service, starting
from ugro.features.services.model import (
    EXHAUSTED,
    Autoscale,
    DoorStats,
    Latency,
    Phase,
    Replica,
    Rollout,
    ServerStats,
    ServiceState,
)
from ugro.features.services.rules.report import report_of
from ugro.features.services.rules.rollout import decided, scaled
from ugro.features.services.rules.steps import DoorSeen, Seen, View
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.errors import NotAllowed, UsageError

OPEN = DoorSeen(job(0), {})
FAILED = Seen(
    Replica(3, 1), job(3, JobState.FAILED, exit_code=EXHAUSTED), last_lines=("no such file", "ugro: it ended 6 times")
)


@pytest.mark.parametrize(
    ("seen", "was_ready", "phase"),
    [
        ((), False, Phase.STARTING),
        ((starting(1),), False, Phase.STARTING),
        ((starting(1),), True, Phase.DOWN),
        ((ready(1),), True, Phase.DEGRADED),
        ((ready(1), ready(2)), True, Phase.READY),
        ((ready(1), FAILED), True, Phase.DEGRADED),
        ((FAILED,), True, Phase.FAILED),
    ],
)
def test_the_state_of_a_service_follows_from_its_replicas(
    seen: tuple[Seen, ...], was_ready: bool, phase: Phase
) -> None:
    of = replace(service(2), was_ready=was_ready)
    assert report_of(View(of, seen, OPEN)).state is phase


def test_a_service_without_replicas_is_idle_if_none_are_wanted() -> None:
    assert report_of(View(service(0), (), OPEN)).state is Phase.IDLE
    assert report_of(View(replace(service(0), state=ServiceState.ENDED))).state is Phase.STOPPED


def test_an_idle_service_says_whether_a_request_starts_a_replica() -> None:
    idle = service(0)
    assert "ugro serve scale chat 1" in report_of(View(idle, door=OPEN)).reason
    follows = replace(idle, spec=replace(idle.spec, scale=Autoscale(0, 2)))
    assert report_of(View(follows, door=OPEN)).reason == "the next request starts a replica"


def test_a_failure_is_said_with_what_the_program_wrote() -> None:
    found = report_of(View(replace(service(2), was_ready=True), (ready(1), FAILED), OPEN))
    assert found.reason == "1 of 2 replicas ready; replica 3 is failed: it ended 6 times; it wrote: no such file"


def test_figures_of_the_door_are_those_of_the_service_and_its_replicas() -> None:
    latency = Latency(count=60, mean_s=0.1, p50_s=0.1, p90_s=0.2, p99_s=0.3)
    own = ServerStats(requests=5, errors=1, sessions=2, latency=latency)
    stats = DoorStats(requests=7, errors=2, sessions=5, queued=3, held=1, latency=latency, servers={"r1": own})
    found = report_of(View(service(1), (ready(1),), OPEN), stats)
    assert (found.traffic.requests, found.traffic.active, found.traffic.queued, found.held) == (7, 2, 3, 1)
    assert (found.traffic.rate, found.traffic.p99_s) == (1.0, 0.3)
    [replica] = found.replicas
    assert (replica.traffic.requests, replica.traffic.errors, replica.weight) == (5, 1, 100)


def test_an_update_can_be_promoted_or_rolled_back_once() -> None:
    held = service(1, rollout=Rollout(2, canary=0.1))
    promoted = decided(held, promotes=True)
    assert promoted.rollout is not None
    assert not promoted.rollout.is_held
    assert "rolled back" in decided(held, promotes=False).note
    with pytest.raises(NotAllowed):
        decided(service(1), promotes=True)


def test_scaling_replaces_what_failed_and_stays_within_bounds() -> None:
    of = replace(service(2), replicas=(Replica(1, 1), Replica(3, 1)))
    assert [one.dropped for one in scaled(of, 2, [ready(1), FAILED]).replicas] == [None, "replaced"]
    bounded = replace(of, spec=replace(of.spec, scale=Autoscale(1, 3)))
    with pytest.raises(UsageError, match="bounds"):
        scaled(bounded, 4, [])
    with pytest.raises(UsageError):
        scaled(of, -1, [])


def test_an_address_of_ipv6_has_brackets() -> None:
    of = service()
    assert report_of(View(replace(of, spec=replace(of.spec, bind="::1")))).url == "http://[::1]:8000"
