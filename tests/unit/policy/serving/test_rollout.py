from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.serving.places import job, ready, service, starting, waiting
from ugro.features.services.model import EXHAUSTED, Replica, ReplicaPhase, Rollout, Service, ServiceState
from ugro.features.services.rules.rollout import ROOM_S, Add, Back, Change, Drop, Finish, applied, changes, event_of
from ugro.features.services.rules.steps import Seen, View
from ugro.kernel.jobs.model import JobState

TO_2 = Rollout(2)
CANARY = Rollout(2, canary=0.1)


def decided(of: Service, *seen: Seen) -> list[Change]:
    return changes(View(of, seen))


def test_missing_replicas_are_added_and_surplus_ones_go_newest_first() -> None:
    assert decided(service(2)) == [Add(1), Add(1)]
    assert decided(service(1), ready(1), ready(2)) == [Drop(2, "scaled down")]
    assert decided(service(1), ready(1), starting(0)) == [Drop(0, "scaled down")]


def test_a_replica_that_ended_is_replaced_and_one_that_failed_too_often_is_not() -> None:
    cancelled = Seen(Replica(1, 1), job(1, JobState.CANCELLED))
    exhausted = Seen(Replica(2, 1), job(2, JobState.FAILED, exit_code=EXHAUSTED))
    assert exhausted.phase is ReplicaPhase.FAILED
    assert decided(service(2), cancelled, exhausted) == [Drop(1, "ended: a reason"), Add(1)]
    assert changes(View(service(2), (cancelled, exhausted), may_replace=False)) == [Drop(1, "ended: a reason")]


def test_a_replica_on_a_drained_node_goes_when_another_is_ready() -> None:
    leaving = replace(ready(1), is_on_drained=True)
    assert decided(service(1), leaving) == [Add(1)]
    assert decided(service(1), leaving, starting(2)) == []
    assert decided(service(1), leaving, ready(2)) == [Drop(1, "its node is drained")]


def test_a_replica_that_is_away_gets_a_substitute_which_goes_if_it_comes_back() -> None:
    away = Seen(Replica(1, 1), job(1, JobState.UNREACHABLE), away_s=60)
    assert decided(service(1), replace(away, away_s=1)) == []
    assert decided(service(1), away) == [Add(1)]
    assert decided(service(1), away, starting(2)) == []
    assert decided(service(1), away, ready(2)) == [Drop(1, "its node is unreachable")]
    assert decided(service(1), ready(1), starting(2)) == [Drop(2, "scaled down")]


def test_an_update_adds_one_beside_and_drops_one_when_that_is_ready() -> None:
    of = service(2, rollout=TO_2)
    assert decided(of, ready(1), ready(2)) == [Add(2)]
    assert decided(of, ready(1), ready(2), starting(3, revision=2)) == []
    assert decided(of, ready(1), ready(2), ready(3, revision=2)) == [Drop(1, "replaced by the update")]
    assert decided(of, ready(2), ready(3, revision=2)) == [Add(2)]
    assert decided(of, ready(3, revision=2), ready(4, revision=2)) == [Finish()]


def test_without_room_beside_the_old_ones_a_new_replica_takes_the_place_of_one() -> None:
    of = service(2, rollout=TO_2)
    short, long = waiting(3, revision=2), waiting(3, revision=2, waits_s=ROOM_S + 1)
    assert decided(of, ready(1), ready(2), short) == []
    assert decided(of, ready(1), ready(2), long) == [Drop(1, "makes room for the update")]
    # One at a time: the first must have ended, and only one may be missing.
    assert decided(of, ready(1, dropped="x"), ready(2), long) == []
    assert decided(of, ready(2), long) == []


def test_without_a_surge_one_goes_first() -> None:
    of = service(2, rollout=TO_2, surge=0)
    assert decided(of, ready(1), ready(2)) == [Drop(1, "makes room for the update")]
    assert decided(of, ready(2)) == [Add(2)]


@pytest.mark.parametrize(
    "bad",
    [
        starting(3, revision=2, restarts=2),
        replace(starting(3, revision=2), unready_s=601),
        Seen(Replica(3, 2), job(3, JobState.FAILED, exit_code=EXHAUSTED)),
        Seen(Replica(3, 2), job(3, JobState.FAILED, exit_code=1)),
    ],
)
def test_an_update_whose_replica_does_not_get_ready_is_rolled_back(bad: Seen) -> None:
    [back] = decided(service(2, rollout=TO_2), ready(1), ready(2), bad)
    assert isinstance(back, Back)
    assert back.reason.startswith("replica 3 ")


def test_after_a_rollback_new_replicas_go_and_old_ones_come_back_first() -> None:
    of = service(2)
    assert decided(of, ready(2), starting(3, revision=2)) == [Add(1), Drop(3, "the update was rolled back")]
    assert decided(of, ready(2), ready(3, revision=2), starting(4)) == []
    assert decided(of, ready(2), ready(3, revision=2), ready(4)) == [Drop(3, "the update was rolled back")]


def test_a_canary_stays_beside_until_it_is_promoted() -> None:
    of = service(2, rollout=CANARY)
    assert decided(of, ready(1), ready(2)) == [Add(2)]
    assert decided(of, ready(1), ready(2), ready(3, revision=2)) == []
    promoted = service(2, rollout=replace(CANARY, is_promoted=True))
    assert decided(promoted, ready(1), ready(2), ready(3, revision=2)) == [Drop(1, "replaced by the update")]


def test_an_update_of_an_idle_service_is_done_at_once() -> None:
    assert decided(service(0, rollout=TO_2)) == [Finish()]


def test_a_service_that_stops_lets_all_go() -> None:
    of = replace(service(2), state=ServiceState.STOPPING)
    assert decided(of, ready(1), ready(2, dropped="before")) == [Drop(1, "the service stops")]


@pytest.mark.parametrize("stuck", [starting(1), waiting(1, waits_s=99.0), replace(ready(1), server=None)])
def test_an_old_replica_that_does_not_serve_makes_room_for_the_update_that_mends_it(stuck: Seen) -> None:
    new = waiting(2, revision=2, waits_s=ROOM_S + 1)
    assert decided(service(1, rollout=TO_2), stuck, new) == [Drop(1, "makes room for the update")]
    going = replace(stuck, replica=Replica(3, 1, "makes room for the update"))
    assert decided(service(2, rollout=TO_2), ready(1), going, new) == [], "one at a time"


def test_with_fewer_devices_than_replicas_an_update_replaces_those_that_serve_one_by_one() -> None:
    rollout = replace(TO_2, served=2)
    new, late = waiting(5, revision=2, waits_s=ROOM_S + 1), waiting(6, revision=2, waits_s=ROOM_S + 1)
    assert decided(service(3, rollout=rollout), ready(1), ready(2), new)[-1] == Drop(1, "makes room for the update")
    assert Drop(2, "makes room for the update") not in decided(service(3, rollout=rollout), ready(2), new)
    done = ready(3, revision=2), ready(4, revision=2)
    [over] = changes_of = decided(service(3, rollout=rollout), *done, late)
    assert over == Finish("2 of 3 replicas ready, the others wait for devices")
    assert event_of(over) == ("updated", "the update is over: 2 of 3 replicas ready, the others wait for devices")
    assert "2 of 3 replicas ready" in applied(service(3, rollout=rollout), changes_of).note
    assert not any(isinstance(one, Finish) for one in decided(service(3, rollout=rollout), done[0], late, new))


def test_an_update_is_not_over_while_an_old_replica_has_the_devices_that_a_new_one_waits_for() -> None:
    """It answers what it has; then there is room for all."""
    of, late = service(3, rollout=replace(TO_2, served=2)), waiting(6, revision=2, waits_s=ROOM_S + 1)
    done = ready(4, revision=2), ready(5, revision=2)
    assert decided(of, ready(3, dropped="replaced by the update"), *done, late) == []
    assert decided(of, *done, ready(6, revision=2)) == [Finish()]
