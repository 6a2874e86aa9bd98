"""Nodes on which jobs run in the accounts of their users: a job starts only where its user can log in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.scheduling.test_scheduler import holds, job, node, snapshot, started, wait_of
from ugro.kernel.jobs.model import Resources
from ugro.kernel.jobs.scheduling.fit import LoginView, Seeker, objection, seekers
from ugro.kernel.jobs.scheduling.model import NodeView, NoLogin, Waiting
from ugro.kernel.jobs.scheduling.queue import WaitingJobs
from ugro.kernel.jobs.scheduling.scheduler import actions, schedule
from ugro.kernel.jobs.scheduling.why import why

DENIED = "cannot be reached as ann: login denied"


def personal(name: str, *refused: str, gpus: int = 1, is_lasting: bool = True) -> NodeView:
    missing = tuple(NoLogin(user, f"cannot be reached as {user}: login denied", is_lasting) for user in refused)
    return replace(node(name, gpus), is_personal=True, no_login=missing)


def of(user: str, waiting: Waiting) -> Waiting:
    return replace(waiting, user=user)


def test_a_login_is_objected_to_until_its_node_has_said_what_runs_there() -> None:
    ann = LoginView("ann", "lab-ann", is_open=True, has_reported=True)
    assert objection(ann) is None
    words = {
        "has no account for ann: 'lab-ann' is no account's name": replace(ann, is_valid=False),
        "is being connected as lab-ann": replace(ann, is_open=False),
        "cannot be reached as lab-ann: login denied": replace(ann, is_open=False, error="login denied"),
        "is another machine for lab-ann: its GPUs are not the same": replace(ann, is_other_machine=True),
        "has not said yet what runs there as lab-ann": replace(ann, has_reported=False),
    }
    assert {found.reason: view for view in words.values() if (found := objection(view)) is not None} == words


@pytest.mark.parametrize(("cause", "is_lasting"), [("login-denied", True), ("name-not-found", False)])
def test_only_what_is_wrong_with_the_account_keeps_its_user_from_a_node_for_good(cause: str, is_lasting: bool) -> None:
    found = objection(LoginView("ann", "ann", error="no", cause=cause))
    assert found == NoLogin("ann", "cannot be reached as ann: no", is_lasting)


def test_a_job_starts_where_its_user_can_log_in() -> None:
    nodes = [personal("n1", "ann"), personal("n2", "bob")]
    decisions = schedule(snapshot(nodes, [of("ann", job(1)), of("bob", job(2))]))
    assert started(decisions) == {1: ("n2",), 2: ("n1",)}


def test_a_user_who_is_refused_does_not_hold_up_others_with_the_same_demand() -> None:
    view = snapshot([personal("n1", "ann")], [of("ann", job(1)), of("ann", job(2)), of("bob", job(3))])
    assert started(schedule(view)) == {3: ("n1",)}
    assert started(actions(view, WaitingJobs.of(view.waiting, {}))) == {3: ("n1",)}


def test_the_reason_names_the_node_that_refuses_the_user() -> None:
    view = snapshot([personal("n1", "ann")], [of("ann", job(1))])
    assert wait_of(schedule(view), 1).reason == f"needs a node with 1 GPU; no usable node has that; n1 {DENIED}"
    assert "n1 cannot be reached as ann: login denied" in why(view, 1).text
    assert "ann" not in why(snapshot([personal("n1", "ann")], [of("bob", job(1))], [holds(9, "n1")]), 1).text


def test_nothing_is_reserved_for_a_user_on_a_node_that_refuses_them() -> None:
    nodes = [personal("n1", "ann"), personal("n2")]
    view = snapshot(nodes, [of("ann", job(1)), of("bob", job(2))], [holds(9, "n2")])
    assert started(schedule(view)) == {2: ("n1",)}


def test_a_job_that_left_gpus_open_takes_cores_if_all_nodes_with_gpus_refuse_its_user() -> None:
    either = of("ann", job(1, resources=Resources(gpus_per_node=-2)))
    nodes = [personal("gpu", "ann"), personal("cpu", gpus=0)]
    assert started(schedule(snapshot(nodes, [either]))) == {1: ("cpu",)}
    trying = [personal("gpu", "ann", is_lasting=False), personal("cpu", gpus=0)]
    assert started(schedule(snapshot(trying, [either]))) == {}, "it may be let in any moment"


def test_jobs_of_two_users_are_of_one_kind_where_nodes_make_no_difference_and_change_with_the_nodes() -> None:
    waiting = WaitingJobs.of([of("ann", job(1)), of("bob", job(2))], {})
    assert waiting.kind_of(1) is waiting.kind_of(2)
    waiting.tell_users_apart(True)
    assert waiting.kind_of(1) is not waiting.kind_of(2)
    assert [line.user for line in waiting.lines] == ["ann", "bob"]
    waiting.tell_users_apart(False)
    assert waiting.kind_of(1) is waiting.kind_of(2)


def test_a_user_seeks_the_nodes_that_the_waiting_jobs_may_use() -> None:
    named = Resources(only=("a", "b"))
    either = Resources(any_of=(Resources(labels=("fast",)), named))
    waits = of("cat", replace(job(4), not_before=1e12))
    ann = [of("ann", job(1, resources=either)), of("ann", job(2, resources=named))]
    queue = WaitingJobs.of([*ann, of("bob", job(3)), waits], {})
    found = seekers(queue.lines)
    assert found == {Seeker("ann", ("a", "b")), Seeker("ann", (), ("fast",)), Seeker("bob")}
    assert [one.may_use("c", ("fast", "new")) for one in sorted(found)] == [True, False, True]
