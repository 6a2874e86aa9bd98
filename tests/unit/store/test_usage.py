"""What users have used: on the books with the move that ends an attempt, and there for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.features.quotas.model import HOUR_S
from ugro.kernel.jobs import moves as usage
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Resources, Share, Sharing
from ugro.kernel.jobs.records import hours_between
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.moments import Instant

GPUS = Placement((Share("n1", (0, 1), cpus=2), Share("n2", cpus=3)))


async def run(store: Store, user: str, key: str, placement: Placement = GPUS, **spec: object) -> Job:
    made = JobSpec("job", ("true",), **spec)  # type: ignore[arg-type]
    job = (await store.jobs.submit(made, user, key)).job
    job = await store.jobs.start(job, placement, "free")
    job = await store.jobs.move(job, JobState.RUNNING, "runs")
    return await store.jobs.move(job, JobState.STOPPING, "ended")


def test_an_attempt_is_on_the_books_as_it_ends_and_not_before(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        assert await store.usage.totals() == {}
        await store.jobs.move(job, JobState.SUCCEEDED, "done", exit_code=0)
        [(user, totals)] = (await store.usage.totals()).items()
        assert (user, totals.jobs) == ("ann", 1)
        assert totals.gpu_s > 0
        # Two GPUs on the first node; three cores on the second, where the job has no GPU.
        assert totals.cpu_s == pytest.approx(totals.gpu_s * 3 / 2)
        [hour] = {one.user: one for one in await store.usage.newer(0, 0)}.values()
        assert hour.device_s == pytest.approx(totals.gpu_s * 3 / 2)

    in_store(tmp_path, work)


def test_each_attempt_counts_and_the_job_counts_once(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        job = await store.jobs.move(job, JobState.RECOVERING, "again")
        first = (await store.usage.totals())["ann"]
        job = await store.jobs.start(job, GPUS, "free")
        job = await store.jobs.move(job, JobState.STOPPING, "ended")
        await store.jobs.move(job, JobState.FAILED, "failed", exit_code=1)
        second = (await store.usage.totals())["ann"]
        assert (first.jobs, second.jobs) == (1, 1)
        assert second.gpu_s > first.gpu_s

    in_store(tmp_path, work)


def test_a_job_that_never_started_used_nothing(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = (await store.jobs.submit(JobSpec("job", ("true",)), "ann", "1")).job
        await store.jobs.move(job, JobState.CANCELLED, "cancelled", exit_code=130)
        assert await store.usage.totals() == {}

    in_store(tmp_path, work)


def test_what_was_used_outlives_the_job_and_the_agent(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        job = await store.jobs.move(job, JobState.SUCCEEDED, "done", exit_code=0)
        await store.usage.note_energy({job.id: 7200.0})
        before = await store.usage.totals()
        assert await store.retention.remove([job.id], job.ended_at or "", lambda jobs: "removed") == [job.id]
        await store.usage.note_energy({job.id: 9999.0})  # of a job that is gone
        assert await store.usage.totals() == before
        assert before["ann"].joules == 7200.0
        found.append(before)

    async def again(store: Store) -> None:
        assert [await store.usage.totals()] == found

    found: list[object] = []
    in_store(tmp_path, work)
    in_store(tmp_path, again)


def test_energy_counts_once_however_often_it_is_read(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        for joules in (100.0, 100.0, 250.0, 200.0):
            await store.usage.note_energy({job.id: joules})
        assert (await store.usage.totals())["ann"].joules == 250.0

    in_store(tmp_path, work)


def test_a_reader_finds_what_has_changed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        await store.jobs.move(job, JobState.SUCCEEDED, "done", exit_code=0)
        seen = (await store.usage.newer(0, 0))[-1].changed
        assert await store.usage.newer(seen, 0) == []
        job = await run(store, "bob", "2")
        await store.jobs.move(job, JobState.SUCCEEDED, "done", exit_code=0)
        assert {one.user for one in await store.usage.newer(seen, 0)} == {"bob"}

    in_store(tmp_path, work)


def test_a_job_that_shares_a_gpu_is_charged_its_part(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        shared = Placement((Share("n1", (0,), gpu_group="sweep"),))
        resources = Resources(gpus_per_node=1, sharing=Sharing("sweep", 4))
        job = await run(store, "ann", "1", shared, resources=resources)
        await store._database.run(lambda db: usage.charge(db, job, _later(job, 3600.0)))
        total = (await store.usage.totals())["ann"]
        assert total.gpu_s == pytest.approx(900.0, abs=1.0)

    in_store(tmp_path, work)


def test_a_long_attempt_is_spread_over_its_hours(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = await run(store, "ann", "1")
        end = _later(job, 5 * HOUR_S)
        await store._database.run(lambda db: usage.charge(db, job, end))
        hours = await store.usage.newer(0, 0)
        assert len(hours) == 6 or end.wall_s % HOUR_S == 0
        assert sum(one.gpu_s for one in hours) == pytest.approx(2 * 5 * HOUR_S, abs=1)
        assert max(one.gpu_s for one in hours) <= 2 * HOUR_S + 1e-6
        assert (await store.usage.totals(hours[-1].hour))["ann"].gpu_s < 2 * HOUR_S + 1e-6

    in_store(tmp_path, work)


def _later(job: Job, seconds: float) -> Instant:
    """The same boot: a wall clock that was set meanwhile changes no duration."""
    started = job.attempt_started
    assert started is not None
    return Instant(clock.now().wall_s - 86400.0, started.boot_id, started.boot_s + seconds)


def test_hours_of_the_wall_clock() -> None:
    parts = [(part.hour, part.seconds) for part in hours_between(3000.0, 7500.0)]
    assert parts == [(0, 600.0), (1, 3600.0), (2, 300.0)]
    assert list(hours_between(10.0, 10.0)) == []
