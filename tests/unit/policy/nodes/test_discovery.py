"""Who joins, who has left, who is removed: never a node with a job on it, and nothing because a source is down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ugro.features.discovery.model import Candidate, Found, Member, SourceState, Standing
from ugro.features.discovery.rules import Act, Situation, Step, absences, found_nodes, joinable, judge_sources, steps
from ugro.kernel.agent.model import Grade
from ugro.kernel.links.model import NodeSpec

GPU1 = Candidate("gpu1", "10.0.0.1", sources=("zookeeper",))
MOVED = replace(GPU1, host="10.0.0.9")
GONE = "no longer listed by zookeeper"


def situation(**changes: Any) -> Situation:
    plain: dict[str, Any] = {
        "candidates": {"gpu1": GPU1}, "sources": {"zookeeper"}, "unsure": (), "configured": (), "busy": (),
        "answering": {"gpu1"}, "doubles": {}, "absent_s": {}, "sleeping": (),
    }  # fmt: skip
    return Situation(**{**plain, **changes})


def step(member: Member, **changes: Any) -> Step | None:
    found = steps([member], situation(**changes))
    assert len(found) <= 1
    return found[0] if found else None


def test_a_node_that_is_listed_stays_as_it_is() -> None:
    assert step(Member(GPU1)) is None


def test_a_node_that_is_missing_for_long_is_drained_and_one_that_flaps_is_not() -> None:
    assert step(Member(GPU1), candidates={}, absent_s={"gpu1": 59.0}) is None
    assert step(Member(GPU1), candidates={}, absent_s={"gpu1": 60.0}) == Step(Act.LEAVE, "gpu1", reason=GONE)


@pytest.mark.parametrize("busy", [(), ("gpu1",)])
def test_a_node_that_left_is_removed_only_when_no_job_holds_anything_there(busy: tuple[str, ...]) -> None:
    found = step(Member(GPU1, has_left=True), candidates={}, busy=busy)
    assert found == (None if busy else Step(Act.REMOVE, "gpu1"))


def test_a_node_is_drained_before_it_is_removed_even_if_it_is_idle() -> None:
    found = step(Member(GPU1), candidates={}, absent_s={"gpu1": 1e6})
    assert found is not None
    assert found.act is Act.LEAVE


@pytest.mark.parametrize("has_left", [False, True])
def test_a_source_that_cannot_be_read_changes_nothing(has_left: bool) -> None:
    member = Member(GPU1, has_left)
    assert step(member, candidates={}, unsure={"zookeeper"}, absent_s={"gpu1": 1e6}) is None


def test_an_absence_begins_when_it_is_seen_ends_when_it_is_not_certain_and_then_begins_again() -> None:
    members = [Member(GPU1)]
    assert absences(members, {"gpu1"}, (), {}, 10.0) == {}
    seen = absences(members, (), (), {}, 10.0)
    assert seen == {"gpu1": 10.0}
    assert absences(members, (), (), seen, 50.0) == seen
    assert absences(members, (), {"mdns"}, seen, 50.0) == seen, "another source is down"
    doubt = absences(members, (), {"zookeeper"}, seen, 60.0)
    assert doubt == {}
    assert absences(members, (), (), doubt, 70.0) == {"gpu1": 70.0}


def test_one_of_two_sources_that_is_down_is_reason_enough_to_wait() -> None:
    member = Member(replace(GPU1, sources=("zookeeper", "mdns")))
    both = {"zookeeper", "mdns"}
    assert step(member, candidates={}, sources=both, unsure={"mdns"}, absent_s={"gpu1": 1e6}) is None


@pytest.mark.parametrize("leave_after_s", [0.0, 60.0])
def test_a_node_that_sleeps_stays_although_a_machine_that_sleeps_is_not_listed(leave_after_s: float) -> None:
    found = step(
        Member(GPU1), candidates={}, sleeping={"gpu1"}, absent_s={"gpu1": 1e6}, leave_after_s=leave_after_s
    )
    assert found is None


def test_a_node_that_wakes_has_the_whole_time_to_be_listed_again() -> None:
    members = [Member(GPU1)]
    asleep = absences(members, (), (), {"gpu1": 10.0}, 500.0, sleeping={"gpu1"})
    assert asleep == {}
    assert absences(members, (), (), asleep, 600.0) == {"gpu1": 600.0}


def test_sleep_keeps_no_node_that_has_left_or_may_not_join_by_itself_or_has_another_name() -> None:
    silent = {"candidates": {}, "sleeping": {"gpu1"}, "absent_s": {"gpu1": 1e6}}
    assert step(Member(GPU1, has_left=True), **silent) == Step(Act.REMOVE, "gpu1"), "it left before it fell silent"
    for reason in ({"sources": ()}, {"doubles": {"gpu1": "box"}}):
        found = step(Member(GPU1), **{**silent, **reason})
        assert found is not None
        assert found.act is Act.LEAVE


def test_a_node_that_is_back_takes_jobs_again() -> None:
    assert step(Member(GPU1, has_left=True)) == Step(Act.PUT, "gpu1", GPU1)


def test_another_address_is_not_used_while_a_job_runs_on_a_node_that_answers() -> None:
    assert step(Member(GPU1), candidates={"gpu1": MOVED}) == Step(Act.PUT, "gpu1", MOVED)
    assert step(Member(GPU1), candidates={"gpu1": MOVED}, busy={"gpu1"}) is None
    lost = step(Member(GPU1), candidates={"gpu1": MOVED}, busy={"gpu1"}, answering=())
    assert lost == Step(Act.PUT, "gpu1", MOVED), "its address has changed: the job is found again there"
    labelled = replace(MOVED, labels=("fast",))
    found = step(Member(GPU1), candidates={"gpu1": labelled}, busy={"gpu1"})
    assert found == Step(Act.PUT, "gpu1", replace(GPU1, labels=("fast",))), "its labels are no reason to wait"


def test_a_node_that_comes_back_elsewhere_while_its_job_runs_keeps_its_address() -> None:
    found = step(Member(GPU1, has_left=True), candidates={"gpu1": MOVED}, busy={"gpu1"})
    assert found == Step(Act.PUT, "gpu1", GPU1)


def test_a_name_of_the_cluster_file_is_its_own() -> None:
    for member in (Member(GPU1), Member(GPU1, has_left=True)):
        assert step(member, configured={"gpu1"}, busy={"gpu1"}) == Step(Act.HAND_OVER, "gpu1")


def test_a_source_that_is_no_longer_configured_lists_nothing() -> None:
    found = step(Member(GPU1), candidates={}, sources=())
    assert found == Step(Act.LEAVE, "gpu1", reason="nodes of zookeeper no longer join by themselves")


def test_a_second_name_of_a_machine_goes() -> None:
    found = step(Member(GPU1), doubles={"gpu1": "box"})
    assert found == Step(Act.LEAVE, "gpu1", reason="is the same machine as box")


def test_nothing_leaves_while_it_is_not_certain_which_jobs_run() -> None:
    for member in (Member(GPU1), Member(GPU1, has_left=True)):
        assert step(member, candidates={}, absent_s={"gpu1": 1e6}, may_leave=False) is None
    assert step(Member(GPU1, has_left=True), may_leave=False) is not None, "coming back is no loss"


# --- joining -------------------------------------------------------------------------------------------------------


def names(found: list[Candidate]) -> list[str]:
    return [one.name for one in found]


def test_new_machines_may_join_up_to_the_limit() -> None:
    listed = {f"n{number}": Candidate(f"n{number}", f"10.0.0.{number}") for number in range(5)}
    assert names(joinable(listed, ("n0", "x"), (), 3)) == ["n1", "n2", "n3", "n4"]
    assert joinable(listed, ("a", "b", "c"), (), 3) == []


@pytest.mark.parametrize(
    "spec",
    [
        NodeSpec("gpu1", host="elsewhere"),
        NodeSpec("gpu1", transport="local"),
        NodeSpec("box", host="10.0.0.1"),
        NodeSpec("10.0.0.1"),
        NodeSpec("box", host="10.0.0.1", user="ann", port=22),
    ],
)
def test_a_name_or_an_address_of_the_cluster_file_does_not_join(spec: NodeSpec) -> None:
    assert joinable({"gpu1": GPU1}, (), (spec,), 64) == []


def test_another_port_is_another_machine() -> None:
    assert names(joinable({"gpu1": GPU1}, (), (NodeSpec("box", host="10.0.0.1", port=2222),), 64)) == ["gpu1"]


# --- what is shown -------------------------------------------------------------------------------------------------


def shown(member: Member | None = None, configured: tuple[NodeSpec, ...] = (), *, is_listed: bool = True) -> Found:
    [found] = found_nodes(
        {"gpu1": GPU1} if is_listed else {}, {"gpu1": member} if member else {}, configured, {"gpu1": "no key"}
    )
    return found


def test_where_a_machine_stands() -> None:
    assert (shown().standing, shown().note) == (Standing.NEW, "no key")
    assert (shown(Member(GPU1)).standing, shown(Member(GPU1)).note) == (Standing.JOINED, None)
    moved = shown(Member(MOVED))
    assert moved.target == "10.0.0.9"
    assert moved.note == "listed at 10.0.0.1 now; a job runs here"
    left = shown(Member(GPU1, has_left=True), is_listed=False)
    assert (left.standing, left.note) == (Standing.LEFT, "takes no new jobs, and is removed when it is idle")
    assert shown(Member(GPU1), is_listed=False).note == "not listed now"


def test_a_second_name_that_takes_no_new_jobs_is_not_shown_as_joined_while_it_is_listed() -> None:
    found = shown(Member(GPU1, has_left=True))
    assert (found.standing, found.note) == (Standing.LEFT, "takes no new jobs, and is removed when it is idle")


def test_a_machine_of_the_cluster_file_is_named() -> None:
    box = shown(None, (NodeSpec("box", host="10.0.0.1"),))
    assert (box.node, box.note) == ("box", "is the node box")
    same = shown(None, (NodeSpec("gpu1", host="10.0.0.1"),))
    assert (same.standing, same.note) == (Standing.NODE, None)
    other = shown(None, (NodeSpec("gpu1", host="elsewhere", user="ann"),))
    assert other.note == "the cluster file has this name, at ann@elsewhere"


def test_doctor_names_a_source_that_cannot_be_read() -> None:
    down = SourceState("consul", "http://c:8500", 3, "connection refused", "start it")
    odd = SourceState("mdns", "here", 1, refused=("a b: expected a name",))
    fine = SourceState("command", "./x", 2)
    found = list(judge_sources([down, odd, fine]))
    assert [one.grade for one in found] == [Grade.WARNING, Grade.WARNING, Grade.OK]
    assert found[0].text == "http://c:8500: connection refused; nodes that it listed stay"
    assert "a b: expected a name" in found[1].text
