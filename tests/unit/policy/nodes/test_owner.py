"""The owner of a machine comes first: when one is there, which jobs make way, and which take less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.power.model import OwnerReport, OwnerRule, Then, When
from ugro.features.power.rules import SMALL_PART, Seen, judge, parts, stops, takes
from ugro.kernel.jobs.model import Ending, Job, JobSpec, JobState, Launcher, Placement, Share

RULE = OwnerRule(When.ACTIVE, Then.PAUSE, 600.0)
THERE = Seen(1000.0, "ann types on pts/3", is_known=True, is_open=True, sources=("terminals",))


def owner(then: Then = Then.PAUSE, *, idle_s: float = 0.0) -> OwnerReport:
    return judge(replace(RULE, then=then), THERE, 1000.0 + idle_s)


def job(number: int, *nodes: str, state: JobState = JobState.RUNNING, priority: int = 50) -> Job:
    spec = JobSpec("train", ("train.py",), Launcher.DDP, priority=priority)
    placement = Placement(tuple(Share(node) for node in nodes))
    return Job(number, spec, "ann", state, "", "2026-01-01T00:00:00+00:00", attempt=1, placement=placement)


@pytest.mark.parametrize(("idle_s", "is_there"), [(0, True), (599, True), (600, False), (10**6, False)])
def test_an_owner_is_there_until_it_was_quiet_for_long_enough(idle_s: float, is_there: bool) -> None:
    found = owner(idle_s=idle_s)
    assert (found.is_there, found.idle_s) == (is_there, idle_s)
    assert (found.words is not None) == is_there
    if is_there:
        words = "is used by its owner (ann types on pts/3): no new jobs until it was quiet for 10m"
        assert found.words == words


def test_nobody_was_seen_nothing_is_known_and_nothing_can_be_seen() -> None:
    nobody = judge(RULE, Seen(is_known=True, sources=("terminals",)), 5.0)
    assert (nobody.is_there, nobody.idle_s, nobody.words) == (False, None, None)
    assert judge(RULE, Seen(), 5.0).words == "has not said yet whether somebody uses it"
    assert judge(RULE, Seen(is_known=True, error="broken"), 5.0).words is None, "it is not claimed that somebody is"


def test_every_job_on_the_machine_makes_way_whatever_its_priority() -> None:
    jobs = [job(1, "n1", priority=90), job(2, "n2"), job(3, "n2", "n1", state=JobState.STARTING)]
    found = list(stops(jobs, {"n1": owner(), "n2": owner(idle_s=700)}))
    assert [(stop.job.id, stop.reason) for stop in found] == [
        (1, "it made way for the owner of n1 (ann types on pts/3)"),
        (3, "it made way for the owner of n1 (ann types on pts/3)"),
    ]


@pytest.mark.parametrize("then", [Then.SHRINK, Then.DRAIN])
def test_only_a_pause_ends_jobs(then: Then) -> None:
    assert not list(stops([job(1, "n1")], {"n1": owner(then)}))


def test_a_job_that_ends_already_is_not_asked_again() -> None:
    ending = replace(job(1, "n1"), ending=Ending.CANCELLED)
    assert not list(stops([ending, job(2, "n1", state=JobState.STOPPING)], {"n1": owner()}))


def test_trainings_on_several_nodes_and_jobs_without_gpus_take_a_small_part_where_the_owner_is_there() -> None:
    command = replace(job(4, "n1"), spec=JobSpec("x", ("x",)))
    on_gpu = replace(job(2, "n1"), placement=Placement((Share("n1", (0,)),)))
    jobs = [job(1, "n1", "n2"), on_gpu, job(3, "n1", "n3", state=JobState.STARTING), command]
    owners = {"n1": owner(Then.SHRINK), "n2": owner(Then.SHRINK, idle_s=700), "n3": owner(Then.DRAIN)}
    found = list(parts(jobs, owners))
    assert [(one.job.id, one.node, one.part, one.is_of_cores) for one in found] == [
        (1, "n1", SMALL_PART, False), (1, "n2", 1.0, False), (4, "n1", SMALL_PART, True),
    ]  # fmt: skip
    assert takes(found[0]) == "the owner of n1 is there: it takes 10% of an equal share of each batch there"
    assert takes(found[1]) == "it may take all of an equal share of each batch on n2 again"
    assert takes(found[2]) == "the owner of n1 is there: it takes 10% of the cores there"
    assert not list(parts(jobs, {"n1": owner(Then.PAUSE)}))
