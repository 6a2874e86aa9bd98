"""What is to be done next for a Ray cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.ray.clusters import cluster, job
from ugro.features.ray.model import ClusterState
from ugro.features.ray.rules import Cancel, Close, Stop, Submit, next_steps
from ugro.kernel.jobs.model import Ending, JobState


def test_the_head_comes_first() -> None:
    assert next_steps(cluster(2), {}) == [Submit(None)]


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.RECOVERING])
def test_workers_wait_for_a_head_that_runs(state: JobState) -> None:
    assert next_steps(cluster(2), {0: job(1, state)}) == []


def test_each_worker_is_submitted_once() -> None:
    wanted = cluster(2)
    running = {0: job(1)}
    assert next_steps(wanted, running) == [Submit(worker) for worker in wanted.workers]
    assert next_steps(wanted, {**running, 1: job(2)}) == [Submit(wanted.workers[1])]
    assert next_steps(wanted, {**running, 1: job(2), 2: job(3, JobState.FAILED)}) == []


def test_a_worker_that_is_not_wanted_any_more_is_cancelled_once() -> None:
    wanted = cluster(2)
    smaller = replace(wanted, workers=wanted.workers[:1], dropped=wanted.workers[1:])
    running = {0: job(1), 1: job(2)}
    assert next_steps(smaller, {**running, 2: job(3)}) == [Cancel(3)]
    assert next_steps(smaller, {**running, 2: replace(job(3), ending=Ending.CANCELLED)}) == []
    assert next_steps(smaller, running) == []


def test_without_its_head_it_ends() -> None:
    assert next_steps(cluster(1), {0: job(1, JobState.CANCELLED), 1: job(2)}) == [Stop(None)]
    [step] = next_steps(cluster(1), {0: job(1, JobState.FAILED, "port 6379 is taken"), 1: job(2)})
    assert step == Stop("its head failed: port 6379 is taken")


def test_it_is_over_when_every_job_is() -> None:
    stopping = replace(cluster(2), state=ClusterState.STOPPING)
    ended = {0: job(1, JobState.CANCELLED), 1: job(2, JobState.FAILED)}
    assert next_steps(stopping, {0: job(1), 1: job(2), 2: job(3, JobState.FAILED)}) == [Cancel(1), Cancel(2)]
    assert next_steps(stopping, {**ended, 2: replace(job(3), ending=Ending.CANCELLED)}) == []
    assert next_steps(stopping, ended) == [Close()]
    assert next_steps(stopping, {}) == [Close()]
    assert next_steps(replace(stopping, state=ClusterState.ENDED), ended) == []
