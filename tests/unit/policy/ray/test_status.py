"""A Ray cluster as users see it."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.policy.ray.clusters import cluster, job
from ugro.features.ray.model import ClusterState, Phase
from ugro.features.ray.rules import Said, said_in, view_of
from ugro.kernel.jobs.model import JobState

LOG = """ugro: head n1-head at 10.0.0.1
ugro: ready
ugro: nodes {"alive": ["n1-head"]}
ugro: nodes {"alive": ["n1-1", "n1-head"]}
"""


def test_a_log_says_what_is_ready_and_who_is_alive() -> None:
    assert said_in("") == Said()
    assert said_in(LOG) == Said(True, frozenset({"n1-1", "n1-head"}))


def test_a_line_that_cannot_be_read_is_passed_over() -> None:
    nonsense = 'ugro: nodes nonsense\nugro: nodes []\nugro: nodes {"alive": 3}\n'
    assert said_in(LOG + nonsense) == said_in(LOG)


def test_it_starts_until_its_head_is_ready() -> None:
    view = view_of(cluster(1), {}, {})
    assert (view.phase, view.reason) == (Phase.STARTING, "the head is not submitted yet")
    view = view_of(cluster(1), {0: job(1, JobState.QUEUED, "no node is free")}, {})
    assert view.reason == "the head is queued: no node is free"
    view = view_of(cluster(1), {0: job(1)}, {})
    assert view.reason == "the head starts Ray on n1"


def test_it_says_why_it_waits() -> None:
    waits = "waiting for the head at 127.0.0.2:6379: [Errno 111] Connection refused"
    jobs, head = {0: job(1), 1: job(2, attempt=3)}, Said(True)
    view = view_of(cluster(1), jobs, {0: head, 1: said_in(f"ugro: {waits}\nsome text\n")})
    assert view.workers[0].waits == waits
    assert view.reason == (
        f"0 of 1 worker has joined; worker 1 on n1 is {waits}; it was started again 2 times: ugro cluster logs ray -w 1"
    )
    near = replace(cluster(1), head=replace(cluster(1).head, address="127.0.0.2"))
    said = view_of(near, jobs, {0: head, 1: Said(waits=waits)}).reason
    assert "a loopback address, which nodes on other machines or in containers do not reach" in said
    goes_on = said_in(f"ugro: {waits}\nugro: worker n1-1 at 127.0.0.2\n")
    assert view_of(cluster(1), {0: job(1)}, {0: goes_on}).reason == "the head starts Ray on n1"
    slow = said_in("ugro: starting for 20 s; Ray wrote: Local node IP: 10.0.0.1\n")
    assert "the head on n1 is starting for 20 s" in view_of(cluster(1), {0: job(1)}, {0: slow}).reason


def test_it_is_complete_when_every_worker_has_joined() -> None:
    jobs = {0: job(1), 1: job(2), 2: job(3, attempt=3)}
    partly = view_of(cluster(2), jobs, {0: Said(True, frozenset({"n1-1"})), 1: Said(True)})
    assert not partly.is_complete
    again = "it was started again 2 times: ugro cluster logs ray -w 2"
    assert partly.reason == f"1 of 2 workers have joined; worker 2 starts Ray on n2; {again}"
    assert [worker.is_alive for worker in partly.workers] == [True, False]
    assert partly.workers[1].restarts == 2
    assert view_of(cluster(2), jobs, dict.fromkeys(jobs, Said(True))).is_complete


def test_a_worker_that_ray_does_not_see_has_not_joined() -> None:
    jobs, ready = {0: job(1), 1: job(2)}, Said(True, frozenset({"n1-head"}))
    assert not view_of(cluster(1), jobs, {0: ready, 1: Said(True)}).is_complete


def test_a_worker_that_has_ended_is_named_since_nobody_else_starts_it() -> None:
    going = view_of(cluster(2), {0: job(1), 1: job(2), 2: job(3, JobState.RECOVERING)}, {})
    assert going.lost is None
    failed = view_of(cluster(2), {0: job(1), 1: job(2), 2: job(3, JobState.FAILED, "out of memory")}, {})
    assert failed.lost is not None
    assert (failed.lost.number, failed.lost.reason) == (2, "out of memory")


def test_what_an_ended_attempt_said_does_not_count() -> None:
    view = view_of(cluster(1), {0: job(1), 1: job(2, JobState.RECOVERING)}, dict.fromkeys((0, 1), Said(True)))
    assert (view.workers[0].is_ready, view.is_complete) == (False, False)


def test_how_it_ended_is_shown() -> None:
    ended = replace(cluster(0), state=ClusterState.ENDED)
    assert view_of(ended, {}, {}).phase is Phase.STOPPED
    failed = view_of(replace(ended, failure="its head failed: x"), {}, {})
    assert (failed.phase, failed.reason) == (Phase.FAILED, "its head failed: x")
