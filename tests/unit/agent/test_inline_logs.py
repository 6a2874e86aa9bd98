"""What small commands wrote: with their end in the database, and in files when somebody reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.rig.stores import in_store
from ugro.kernel.files.results.log_mirror import LogMirror, SmallLogs
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.moves import SmallLog, StaleMove
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import unix_seconds

CONTENT = b"all of it\n"


def small_logs(store: Store, folder: Path) -> SmallLogs:
    return SmallLogs(store.jobs, LogMirror(folder, cast(Any, None)))  # nothing is followed


def log_file(folder: Path, job: Job, rank: int = 0) -> Path:
    return folder / str(job.id) / "attempt_1" / "logs" / f"rank_{rank}.log"


async def started(store: Store) -> Job:
    job = (await store.jobs.submit(JobSpec("small", ("true",)), "ann", "k")).job
    return await store.jobs.start(job, Placement((Share("n1"),)), "free now: n1")


async def ended(store: Store, content: bytes = CONTENT) -> Job:
    job = await started(store)
    finished = await store.jobs.finish(job, SmallLog(job.id, 1, ((0, content),)))
    assert finished.state is JobState.SUCCEEDED
    return finished


@pytest.mark.parametrize("content", [CONTENT, b""])
def test_it_is_in_a_file_when_somebody_reads_it_and_not_before(tmp_path: Path, content: bytes) -> None:
    async def scenario(store: Store) -> None:
        job = await ended(store, content)
        assert not log_file(tmp_path, job).exists()
        logs = small_logs(store, tmp_path)
        await asyncio.gather(*(logs.show(job.id) for _ in range(8)))
        assert log_file(tmp_path, job).read_bytes() == content
        # It is as old as the job, however late it is read.
        assert job.ended_at is not None
        assert log_file(tmp_path, job).stat().st_mtime == pytest.approx(unix_seconds(job.ended_at), abs=0.001)

    in_store(tmp_path, scenario)


@pytest.mark.parametrize("there", [b"", b"all ", CONTENT, b"all \0\0 it\n", b"\0" * 20])
def test_what_is_there_already_is_completed_or_mended(tmp_path: Path, there: bytes) -> None:
    async def scenario(store: Store) -> None:
        job = await ended(store)
        file = log_file(tmp_path, job)
        file.parent.mkdir(parents=True)
        file.write_bytes(there)
        await small_logs(store, tmp_path).show(job.id)
        assert file.read_bytes() == CONTENT

    in_store(tmp_path, scenario)


def test_a_disk_that_takes_no_file_costs_no_log(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        folder = tmp_path / "jobs"
        folder.write_text("in the way")
        job = await ended(store)
        with pytest.raises(UgroError, match="cannot be written"):
            await small_logs(store, folder).show(job.id)
        folder.unlink()
        await small_logs(store, folder).show(job.id)
        assert log_file(folder, job).read_bytes() == CONTENT

    in_store(tmp_path, scenario)


def test_of_a_job_that_was_to_end_meanwhile_nothing_is_recorded(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        job = await started(store)
        await store.jobs.move(job, JobState.STOPPING, "cancelled")
        with pytest.raises(StaleMove):
            await store.jobs.finish(job, SmallLog(job.id, 1, ((0, b"x"),)))
        assert await store.jobs.small_log(job.id) is None
        assert (await store.jobs.get(job.id)).state is JobState.STOPPING

    in_store(tmp_path, scenario)
