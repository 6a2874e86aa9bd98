"""Logs of small commands: with their end in the database, then in files; whoever reads them finds them at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.rig.stores import in_store
from ugro.agent.freshlogs import FreshLogs
from ugro.agent.logmirror import LogMirror
from ugro.core.errors import UgroError
from ugro.core.job import Job, JobSpec, JobState, Placement, Share
from ugro.store.database import Store
from ugro.store.freshlogs import FreshLog


def mirror(folder: Path) -> LogMirror:
    return LogMirror(folder, cast(Any, None))  # nothing is followed


def log_file(folder: Path, job: Job, rank: int = 0) -> Path:
    return folder / str(job.id) / "attempt_1" / "logs" / f"rank_{rank}.log"


async def started(store: Store, key: str = "k") -> Job:
    job = (await store.jobs.submit(JobSpec("small", ("true",)), "ann", key)).job
    return await store.jobs.start(job, Placement((Share("n1"),)), "free now: n1")


async def ended(store: Store, fresh: FreshLogs, content: bytes = b"all of it\n", key: str = "k") -> Job:
    job = await started(store, key)
    log = FreshLog(job.id, 1, ((0, content),))
    await fresh.take([log])
    [finished] = await store.jobs.finish_many([(job, log)])
    assert isinstance(finished, Job)
    assert finished.state is JobState.SUCCEEDED
    return finished


def test_a_log_is_no_file_until_somebody_reads_it(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        fresh = FreshLogs(store.jobs, mirror(tmp_path))
        job = await ended(store, fresh)
        assert not log_file(tmp_path, job).exists()
        await fresh.show(job.id)
        assert log_file(tmp_path, job).read_bytes() == b"all of it\n"
        assert await store.jobs.fresh_logs() != []  # the file may not last yet

    in_store(tmp_path, scenario)


def test_what_an_agent_before_us_left_is_found_and_settled(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        one = await ended(store, FreshLogs(store.jobs, mirror(tmp_path)), key="one")
        other = await ended(store, FreshLogs(store.jobs, mirror(tmp_path)), b"", key="other")
        successor = FreshLogs(store.jobs, mirror(tmp_path))
        await successor.show(one.id)
        assert log_file(tmp_path, one).read_bytes() == b"all of it\n"
        await successor.settle_all()
        assert log_file(tmp_path, other).read_bytes() == b""
        assert await store.jobs.fresh_logs() == []
        log_file(tmp_path, one).unlink()
        await successor.show(one.id)  # its files are the user's now
        assert not log_file(tmp_path, one).exists()

    in_store(tmp_path, scenario)


def test_of_a_log_that_was_followed_only_the_rest_is_written(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        fresh = FreshLogs(store.jobs, mirror(tmp_path))
        job = await ended(store, fresh)
        file = log_file(tmp_path, job)
        file.parent.mkdir(parents=True)
        file.write_bytes(b"all ")
        await fresh.settle([job.id])
        assert file.read_bytes() == b"all of it\n"

    in_store(tmp_path, scenario)


def test_a_disk_that_takes_no_file_costs_no_log(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        folder = tmp_path / "jobs"
        folder.write_text("in the way")
        fresh = FreshLogs(store.jobs, mirror(folder))
        job = await ended(store, fresh)
        with pytest.raises(UgroError, match="logs cannot be written"):
            await fresh.settle([job.id])
        assert await store.jobs.fresh_logs() == [FreshLog(job.id, 1, ((0, b"all of it\n"),))]
        folder.unlink()
        await fresh.settle([job.id])
        assert log_file(folder, job).read_bytes() == b"all of it\n"

    in_store(tmp_path, scenario)


def test_a_job_that_was_to_end_meanwhile_is_recorded_without_its_log(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        job = await started(store)
        cancelled = await store.jobs.move(job, JobState.STOPPING, "cancelled")
        [outcome] = await store.jobs.finish_many([(job, FreshLog(job.id, 1, ((0, b"x"),)))])
        assert isinstance(outcome, Exception)
        assert await store.jobs.fresh_logs() == []
        assert (await store.jobs.get(job.id)).state is cancelled.state

    in_store(tmp_path, scenario)
