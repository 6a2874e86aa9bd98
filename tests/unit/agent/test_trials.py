"""A trial that nobody waits for ends, whenever its plan was left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tests.unit.agent.test_forecasts import SPEC
from tests.unit.store.test_database import in_store
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.service import JobService
from ugro.agent.planning.trials import KEY, Request, Trials, trial_spec
from ugro.core.job import Ending, Job, JobSpec, JobState, Share
from ugro.store.database import Store

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
