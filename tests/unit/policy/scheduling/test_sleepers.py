"""Jobs and nodes that sleep: those that are awake come first, then waking ones, then those that are asleep."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.policy.scheduling.test_scheduler import holds, job, node, snapshot, started, wait_of
from ugro.features.power.model import PowerState
from ugro.kernel.jobs.model import Resources
from ugro.kernel.jobs.scheduling.model import Asleep, NodeView
from ugro.kernel.jobs.scheduling.queue import WaitingJobs
from ugro.kernel.jobs.scheduling.scheduler import actions, node_wishes, schedule
from ugro.kernel.jobs.scheduling.why import why

ASLEEP = Asleep(PowerState.ASLEEP, 0.0, 60.0, 300.0)
WAKING = Asleep(PowerState.WAKING, 60.0, 60.0, 300.0)


def sleeper(name: str, asleep: Asleep = ASLEEP, gpus: int = 1) -> NodeView:
    return node(name, gpus, asleep=asleep)


def test_a_node_that_is_awake_is_preferred_however_fast_the_others_are() -> None:
    fast = replace(sleeper("fast"), speed=9.0)
    assert started(schedule(snapshot([fast, node("slow")], [job(1)]))) == {1: ("slow",)}


def test_a_job_that_fits_only_on_a_sleeping_node_waits_for_it_and_wakes_it() -> None:
    view = snapshot([node("n1"), sleeper("n2")], [job(2)], [holds(1, "n1")])
    wait = wait_of(schedule(view), 2)
    assert wait.wakes == ("n2",)
    assert wait.reason == "needs a node with 1 GPU; n2 is asleep and is being woken"
    assert wait.may_start_at == 400.0
    assert actions(view) == [], "nothing starts on a node that sleeps"
    assert node_wishes(view, WaitingJobs.of(view.waiting, {})).wakes == {"n2": (2,)}


def test_why_says_since_when_it_is_being_woken() -> None:
    view = snapshot([sleeper("gpu2", WAKING)], [job(1)])
    found = why(view, 1)
    assert found.text == "needs a node with 1 GPU; waking gpu2 (since 40.0 s)"
    assert found.may_start_at == 360.0


def test_a_waking_node_is_preferred_to_one_that_is_asleep() -> None:
    waits = schedule(snapshot([sleeper("a"), sleeper("b", WAKING)], [job(1)]))
    assert wait_of(waits, 1).wakes == ("b",)


def test_each_of_many_jobs_wakes_a_node_of_its_own() -> None:
    view = snapshot([sleeper(f"n{number}") for number in range(8)], [job(number) for number in range(10, 18)])
    wishes = node_wishes(view, WaitingJobs.of(view.waiting, {}))
    assert sorted(wishes.wakes) == [f"n{number}" for number in range(8)]


def test_a_job_waits_for_a_node_that_is_free_before_another_could_be_woken() -> None:
    soon = [holds(1, "n1", time_limit_s=130.0)]  # ends in 30 s, and waking takes 60
    wait = wait_of(schedule(snapshot([node("n1"), sleeper("n2")], [job(2)], soon)), 2)
    assert (wait.wakes, wait.blocked_by) == ((), (1,))
    later = [holds(1, "n1", time_limit_s=900.0)]
    assert wait_of(schedule(snapshot([node("n1"), sleeper("n2")], [job(2)], later)), 2).wakes == ("n2",)


def test_a_job_on_several_nodes_keeps_those_that_are_awake_while_the_others_wake() -> None:
    view = snapshot([node("n1"), sleeper("n2")], [job(1, on=2), job(2)])
    decisions = schedule(view)
    assert wait_of(decisions, 1).wakes == ("n2",)
    assert started(decisions) == {}, "the second job would take what the first is woken for"


def test_a_job_that_may_take_fewer_nodes_starts_on_those_that_are_awake() -> None:
    flexible = job(1, resources=Resources(min_nodes=1, max_nodes=4, gpus_per_node=1))
    assert started(schedule(snapshot([node("n1"), sleeper("n2")], [flexible]))) == {1: ("n1",)}


def test_a_node_that_does_not_wake_is_no_room_and_its_reason_is_said() -> None:
    sick = replace(sleeper("n2"), unusable="is asleep: it did not wake within 5m, and is tried again in 4m")
    wait = wait_of(schedule(snapshot([sick], [job(1)])), 1)
    assert wait.wakes == ()
    assert "n2 is asleep: it did not wake within 5m" in wait.reason


def test_nodes_with_a_start_or_a_reservation_are_needed() -> None:
    view = snapshot([node("n1"), node("n2"), node("n3", 2)], [job(5), job(6, on=2, gpus=2)], [holds(1, "n3")])
    view = replace(view, nodes=(*view.nodes, node("n4", 2), node("n5")))
    wishes = node_wishes(view, WaitingJobs.of(view.waiting, {}))
    assert {"n3", "n4"} <= wishes.needed
    assert len(wishes.needed) == 3, "and the one on which job 5 starts"
