from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.serving.places import job, ready, service, starting, waiting
from ugro.features.services.model import Replica, ReplicaPhase, Rollout, ServerState, Service, ServiceState
from ugro.features.services.rules.steps import (
    AddServer,
    Cancel,
    Close,
    DoorSeen,
    Forget,
    RenewDoor,
    Seen,
    Step,
    Submit,
    SubmitDoor,
    Turn,
    TurnServer,
    View,
    next_steps,
    reason_of,
    server_name,
)
from ugro.kernel.jobs.model import Ending, Job, JobState

DOOR = job(0)


def view(of: Service, *seen: Seen, door: Job | None = DOOR, is_open: bool = True) -> View:
    servers = {server_name(one.number): one.server for one in seen if one.server is not None}
    return View(of, seen, DoorSeen(door, servers if is_open else None))


def steps(of: Service, *seen: Seen, door: Job | None = DOOR, is_open: bool = True) -> list[Step]:
    return next_steps(view(of, *seen, door=door, is_open=is_open))


def test_a_recorded_replica_is_submitted_and_a_door_too() -> None:
    assert steps(service(1), Seen(Replica(1, 1)), door=None) == [Submit(Replica(1, 1)), SubmitDoor()]


def test_replicas_are_submitted_one_by_one_and_avoid_the_nodes_of_others() -> None:
    placed = starting(1)
    assert steps(service(3), placed, Seen(Replica(2, 1)), Seen(Replica(3, 1))) == [Submit(Replica(2, 1), ("n1",))]
    assert steps(service(3), placed, waiting(2, waits_s=0.1), Seen(Replica(3, 1))) == []
    assert steps(service(3), placed, waiting(2, waits_s=5), Seen(Replica(3, 1))) == [Submit(Replica(3, 1), ("n1",))]


def test_a_ready_replica_is_added_to_the_door_when_that_can_be_asked() -> None:
    new = replace(ready(1), server=None)
    assert steps(service(1), new) == [AddServer(1, "127.0.0.1", 9001, False)]
    assert steps(service(1), new, is_open=False) == []
    assert steps(service(1), starting(1)) == []


def test_a_replica_with_another_port_is_taken_out_and_added_again() -> None:
    seen = ready(1)
    assert seen.probe is not None
    moved = replace(seen, probe=replace(seen.probe, port=9999))
    assert steps(service(1), moved) == [TurnServer(Turn.DRAIN, "r1"), TurnServer(Turn.REMOVE, "r1")]


def test_a_canary_that_is_promoted_is_taken_out_and_added_again() -> None:
    seen = ready(1, revision=2)
    assert seen.server is not None
    canary = replace(seen, server=replace(seen.server, canary=True))
    held = service(1, rollout=Rollout(2, canary=0.1))
    assert steps(held, canary) == []
    assert steps(service(1, rollout=Rollout(2, 0.1, is_promoted=True)), canary) == [
        TurnServer(Turn.DRAIN, "r1"),
        TurnServer(Turn.REMOVE, "r1"),
    ]


def test_a_drained_server_that_is_wanted_again_is_made_ready() -> None:
    seen = ready(1)
    assert seen.server is not None
    drained = replace(seen, server=replace(seen.server, state=ServerState.DRAIN))
    assert steps(service(1), drained) == [TurnServer(Turn.READY, "r1")]


def test_a_replica_that_goes_is_drained_then_cancelled_then_removed_then_forgotten() -> None:
    of = service(0)
    busy = ready(1, dropped="x", sessions=2)
    assert steps(of, busy) == [TurnServer(Turn.DRAIN, "r1")]
    assert busy.server is not None
    draining = replace(busy, server=replace(busy.server, state=ServerState.DRAIN))
    assert steps(of, draining) == []
    assert steps(of, replace(draining, leaving_s=31)) == [Cancel(101)]
    assert draining.server is not None
    idle = replace(draining, server=replace(draining.server, sessions=0))
    assert steps(of, idle) == [Cancel(101)]
    asked = replace(idle, job=replace(job(1), ending=Ending.CANCELLED))
    assert steps(of, asked) == []
    ended = replace(idle, job=job(1, JobState.CANCELLED))
    assert steps(of, ended) == [TurnServer(Turn.REMOVE, "r1")]
    assert steps(of, replace(ended, server=None)) == [Forget(1)]


def test_a_replica_that_cannot_be_reached_is_not_waited_for() -> None:
    away = Seen(Replica(1, 1, "x"), job(1, JobState.UNREACHABLE))
    assert steps(service(0), away) == [Cancel(101)]


def test_a_door_that_cannot_be_asked_keeps_replicas_until_their_time_is_over() -> None:
    leaving = replace(ready(1, dropped="x"), server=None)
    assert steps(service(0), leaving, is_open=False) == []
    assert steps(service(0), replace(leaving, leaving_s=31), is_open=False) == [Cancel(101)]


def test_servers_of_which_no_row_is_left_are_taken_out() -> None:
    left = ready(7)
    seen = View(service(0), (), DoorSeen(DOOR, {"r7": left.server} if left.server else {}))
    assert next_steps(seen) == [TurnServer(Turn.DRAIN, "r7"), TurnServer(Turn.REMOVE, "r7")]


def test_a_door_whose_job_ended_gets_another_one() -> None:
    assert steps(service(0), door=job(0, JobState.FAILED)) == [RenewDoor("a reason")]


def test_a_door_that_is_not_in_the_account_of_its_folder_makes_way_for_another_one() -> None:
    away = replace(view(service(0), is_open=False), door=DoorSeen(DOOR, is_shut_out=True))
    assert next_steps(away) == [Cancel(DOOR.id)]
    ending = replace(DOOR, ending=Ending.CANCELLED)
    assert next_steps(replace(away, door=DoorSeen(ending, is_shut_out=True))) == []


def test_a_service_that_stops_closes_its_door_last() -> None:
    of = replace(service(1), state=ServiceState.STOPPING)
    assert Cancel(100) not in steps(of, ready(1, dropped="x"))
    assert steps(of) == [Cancel(100)]
    assert steps(of, door=job(0, JobState.CANCELLED)) == [Close()]
    assert steps(replace(of, state=ServiceState.ENDED)) == []


def test_a_service_that_stops_does_not_wait_for_a_door_that_is_away() -> None:
    of, over = replace(service(1), state=ServiceState.STOPPING), Seen(Replica(1, 1, "x"), job(1, JobState.CANCELLED))
    door = job(0, JobState.UNREACHABLE)
    assert steps(of, over, door=door, is_open=False) == [Forget(1)]
    assert steps(of, door=door, is_open=False) == [Cancel(100)]
    assert steps(service(1), over, door=door, is_open=False) == [], "its server must be taken out first"


def test_a_ready_replica_that_the_door_does_not_reach_is_not_ready() -> None:
    seen = ready(1)
    assert seen.server is not None
    down = replace(seen, server=replace(seen.server, state=ServerState.DOWN))
    assert down.phase is ReplicaPhase.UNREADY
    assert "does not reach it at 127.0.0.1:9001" in reason_of(down)


@pytest.mark.parametrize("state", [one for one in JobState if one not in (JobState.RUNNING,)])
def test_every_state_of_a_job_is_a_phase(state: JobState) -> None:
    assert Seen(Replica(1, 1), job(1, state)).phase in ReplicaPhase
    assert Seen(Replica(1, 1, "x"), job(1, state)).phase in ReplicaPhase
