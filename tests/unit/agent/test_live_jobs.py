"""The jobs in memory follow the database: by its notifications, and by comparison if one was missed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.kernel.agent.clock import Clock
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.model import After, Ending, Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.store.database import Store

WHERE = Placement((Share("gpu1", cpus=1),))


async def submitted(jobs: JobStore, key: str, **spec: After) -> Job:
    return (await jobs.submit(JobSpec("job", ("true",), **spec), "ann", key)).job  # type: ignore[arg-type]


def waiting(live: LiveJobs) -> list[int]:
    return sorted(job.id for job in live.queue)


def test_every_change_is_followed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        before = await submitted(store.jobs, "before")
        live = LiveJobs(store.jobs, Clock().reading)
        await live.read()
        job = await submitted(store.jobs, "job")
        assert waiting(live) == [before.id, job.id]
        started = await store.jobs.start(job, WHERE, "test")
        assert (waiting(live), [one.id for one in live.holding()]) == ([before.id], [job.id])
        assert live.states() == {JobState.QUEUED: 1, JobState.STARTING: 1}
        stopping = await store.jobs.move(started, JobState.STOPPING, "test", ending=Ending.DONE)
        await store.jobs.move(stopping, JobState.SUCCEEDED, "test")
        assert (live.get(job.id), live.holding(), live.count) == (None, [], 1)
        await store.jobs.ask_to_end(before.id, Ending.CANCELLED)
        assert (waiting(live), [one.id for one in live.cancelled()]) == ([], [before.id])
        assert live.waiting_count == 1

    in_store(tmp_path, work)


def test_an_end_reaches_the_jobs_that_run_after_it(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        live = LiveJobs(store.jobs, Clock().reading)
        await live.read()
        first = await submitted(store.jobs, "first")
        await submitted(store.jobs, "second", after=After(any=(first.id,)))
        assert live.queue.outcomes == {}
        await store.jobs.move(first, JobState.CANCELLED, "test")
        assert live.queue.outcomes == {first.id: JobState.CANCELLED}

    in_store(tmp_path, work)


def test_a_missed_change_is_found_by_comparison_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(store: Store) -> None:
        live = LiveJobs(store.jobs, Clock().reading, compare_s=0.0)
        jobs = [await submitted(store.jobs, str(number)) for number in range(4)]
        await live.read()
        store.jobs.listen(lambda job: None)  # from here on every notification is lost
        new = await submitted(store.jobs, "new")
        await store.jobs.start(jobs[0], WHERE, "test")
        await store.jobs.move(jobs[1], JobState.CANCELLED, "test")
        await store.jobs.ask_to_end(jobs[2].id, Ending.CANCELLED)
        assert waiting(live) == [job.id for job in jobs], "nothing was heard"
        with caplog.at_level(logging.ERROR):
            await live.read()
        assert waiting(live) == [jobs[3].id, new.id]
        assert [job.id for job in live.holding()] == [jobs[0].id]
        assert [job.id for job in live.cancelled()] == [jobs[2].id]
        assert len(caplog.records) == 4
        caplog.clear()
        await live.read()
        assert caplog.records == [], "a comparison that finds nothing says nothing"

    in_store(tmp_path, work)
