"""Which jobs of a restored state have run to an end since, by what nodes remember."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from ugro.features.safe_mode.records import ended_since, newest_attempts
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Tickets
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.support.errors import Unreachable

QUEUED = Job(7, JobSpec("train", ("true",)), "ann", JobState.QUEUED, "", "2026-01-01T00:00:00")
RUNNING = replace(QUEUED, state=JobState.RUNNING, attempt=1, placement=Placement((Share("n1"), Share("n2"))))


class Node:
    def __init__(self, started: dict[int, int] | None) -> None:
        self._started = started

    async def tickets(self, runs: object, jobs: object) -> Tickets:
        if self._started is None:
            raise Unreachable("cut off", subject="n1")
        return Tickets((), self._started)


class Watch:
    """``started``: by node, the newest attempts there; None: it does not answer. ``has_run``: nodes with the run."""

    def __init__(self, started: dict[str, dict[int, int] | None], has_run: tuple[str, ...] = ()) -> None:
        self._started = started
        self._has_run = has_run

    def runs(self, node: str) -> Node:
        return Node(self._started[node])

    def state(self, node: str, job: int, attempt: int) -> NodeRun:
        return NodeRun(node, RunState.UNKNOWN, is_reachable=self._started[node] is not None)

    def status(self, node: str, job: int, attempt: int) -> Any:
        return object() if node in self._has_run else None


@pytest.mark.parametrize(
    ("job", "watch", "ended"),
    [
        (QUEUED, Watch({"n1": {7: 0}, "n2": {}}), {}),
        (QUEUED, Watch({"n1": {7: 0}, "n2": {7: 2}}), {7: 2}),
        (QUEUED, Watch({"n1": None, "n2": {7: 1}}), {7: 1}),
        (RUNNING, Watch({"n1": {7: 1}, "n2": {7: 1}}), {7: 1}),
        (RUNNING, Watch({"n1": {7: 1}, "n2": {7: 1}}, has_run=("n2",)), {}),
        (RUNNING, Watch({"n1": {7: 1}, "n2": None}), {}),
        (replace(RUNNING, state=JobState.STARTING), Watch({"n1": {7: 0}, "n2": {7: 0}}), {}),  # it never came there
        (replace(RUNNING, state=JobState.RECOVERING), Watch({"n1": {7: 1}, "n2": {7: 1}}), {}),
        (replace(RUNNING, state=JobState.RECOVERING), Watch({"n1": {7: 2}, "n2": {7: 1}}), {7: 2}),
    ],
)
def test_what_came_to_a_node_and_is_gone_has_ended(job: Job, watch: Watch, ended: dict[int, int]) -> None:
    newest, _ = asyncio.run(newest_attempts(cast(RunTracker, watch), ["n1", "n2"], [job.id]))
    assert ended_since(cast(RunTracker, watch), [job], newest) == ended


def test_a_node_that_cannot_say_what_it_ran_is_named() -> None:
    watch = cast(RunTracker, Watch({"n1": None, "n2": {7: 1}}))
    assert asyncio.run(newest_attempts(watch, ["n1", "n2"], [7])) == ({7: 1}, {"n1"})
