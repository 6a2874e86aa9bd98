"""A trial that nobody waits for ends, whenever its plan was left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from tests.unit.agent.test_forecasts import SPEC
from tests.unit.policy.planning.test_reading import solo
from tests.unit.store.test_database import in_store
from ugro.features.planning.forecasts import Forecasts
from ugro.features.planning.model import LaunchPlan, LeftOut
from ugro.features.planning.service import KEY, Late, PlanRequest, PlanService, Ran, Request, Trials, trial_spec
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import Ending, Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Submit
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.store.database import Store

REQUEST = Request(SPEC, (Share("gpu1"),), 3, 30.0, "ann")


class _Jobs:
    """Submits into a real store, and answers only after the client has left."""

    def __init__(self, store: Store, *, is_recorded: bool) -> None:
        self._store = store
        self._is_recorded = is_recorded
        self.has_begun = asyncio.Event()

    async def submit_made(self, spec: JobSpec, user: str, key: str) -> Job:
        if self._is_recorded:
            await self._store.jobs.submit(spec, user, key)
        self.has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def withdraw(self, key: str) -> Job | None:
        return await self._store.jobs.withdraw(key)

    async def cancel(self, word: str) -> Job:
        return await self._store.jobs.ask_to_end(int(word), Ending.CANCELLED)


class _Stuck(_Jobs):
    """Its job goes through some states, and stays in the last one; every look at it takes ten seconds."""

    def __init__(self, store: Store, *states: JobState) -> None:
        super().__init__(store, is_recorded=True)
        self._states = list(states)
        self.now_s = 0.0

    async def submit_made(self, spec: JobSpec, user: str, key: str) -> Job:
        return (await self._store.jobs.submit(spec, user, key)).job

    async def moves(self, number: int, timeout_s: float) -> AsyncGenerator[list[Job]]:
        job = await self._store.jobs.get(number)
        yield [job]
        self.now_s += 10
        if not self._states:
            return
        state = self._states.pop(0)
        if state is JobState.STARTING:
            yield [await self._store.jobs.start(job, Placement((Share("gpu1"),)), "free")]
        else:
            yield [await self._store.jobs.move(job, state, f"it is {state}")]

    def clock(self) -> float:
        assert self.now_s < 3600, "it waits without end"
        return self.now_s


_STARTED = (JobState.STARTING, JobState.RUNNING)
_AWAY = "not available for more than 60 s: "


@pytest.mark.parametrize(
    ("states", "says", "after_s"),
    [
        ((), "busy for more than 60 s: ", 70),
        ((*_STARTED, JobState.UNREACHABLE), _AWAY + "it is unreachable", 90),
        ((*_STARTED, JobState.STOPPING, JobState.RECOVERING), _AWAY + "it is recovering", 100),
        ((*_STARTED, JobState.STOPPING), "its trial took more than 390 s: it is stopping", 410),
    ],
)
def test_a_trial_that_does_not_end_is_given_up_in_time_and_cancelled(
    tmp_path: Path, states: tuple[JobState, ...], says: str, after_s: float
) -> None:
    async def work(store: Store) -> tuple[str, list[Job], float]:
        jobs = _Stuck(store, *states)
        trials = Trials(tmp_path, store.trials, cast(JobService, jobs), cast(ResultService, None), jobs.clock)
        with pytest.raises(Late) as late:
            await trials.run(REQUEST, lambda text: None)
        return str(late.value), await store.jobs.newest(10), jobs.now_s

    text, [job], took_s = in_store(tmp_path / "state.db", work)
    assert text.startswith(says)
    assert job.ending is Ending.CANCELLED or job.state is JobState.CANCELLED
    assert took_s == pytest.approx(after_s, abs=11)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_trial_that_is_recorded_as_its_client_leaves_is_cancelled(tmp_path: Path, is_recorded: bool) -> None:
    async def work(store: Store) -> list[Job]:
        jobs = _Jobs(store, is_recorded=is_recorded)
        trials = Trials(tmp_path, store.trials, cast(JobService, jobs), cast(ResultService, None))
        running = asyncio.create_task(trials.run(REQUEST, lambda text: None))
        await jobs.has_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return await store.jobs.newest(10)

    found = in_store(tmp_path / "state.db", work)
    assert [job.ending for job in found] == ([Ending.CANCELLED] if is_recorded else [])


class _Tried:
    """Trials of which one is late."""

    async def run(self, request: Request, say: object) -> Ran:
        if request.shares[0].node == "gpu2":
            raise Late("busy for more than 60 s: job 7 has it")
        return Ran(Job(1, SPEC, "ann", JobState.SUCCEEDED, "every rank ended with 0", ""), solo(), False)


class _Wanted:
    """A job that would get two nodes."""

    async def read(self, submit: Submit) -> JobSpec:
        return SPEC

    async def uses(self, spec: JobSpec, module: str) -> bool:
        return True

    async def place_idle(self, spec: JobSpec) -> Placement:
        return Placement((Share("gpu1"), Share("gpu2")))


def test_a_node_whose_trial_is_late_is_left_out_and_the_others_are_planned(tmp_path: Path) -> None:
    async def work(store: Store) -> LaunchPlan:
        forecasts = Forecasts(store.trials, store.hardware, Cluster(None), lambda node: None)
        service = PlanService(cast(JobService, _Wanted()), forecasts, cast(Trials, _Tried()))
        request = PlanRequest(Submit("ann", "plan-1"))
        said = [message async for [message] in service.plan(request)]
        return cast(LaunchPlan, said[-1]["plan"])

    plan = in_store(tmp_path / "state.db", work)
    assert plan.best.nodes == ("gpu1",)
    assert plan.left_out == (LeftOut("gpu2", "busy for more than 60 s: job 7 has it"),)


def test_trials_under_way_are_found_by_their_keys_alone(tmp_path: Path) -> None:
    async def work(store: Store) -> tuple[list[int], int]:
        spec = trial_spec(REQUEST)
        ended = (await store.jobs.submit(spec, "ann", f"{KEY}1")).job
        await store.jobs.move(ended, JobState.CANCELLED, "cancelled")
        left = (await store.jobs.submit(spec, "ann", f"{KEY}2")).job
        await store.jobs.submit(spec, "ann", "the same, by a user")
        return await store.trials.jobs_under_way(KEY), left.id

    found, left = in_store(tmp_path / "state.db", work)
    assert found == [left]
