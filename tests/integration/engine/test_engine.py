"""The reconcile loop on real node programs of this machine: jobs run, fail, are cancelled, and survive its death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, command, in_loop, is_final, until
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.model import Ending, Job, JobSpec, JobState, Launcher, Resources, Retry
from ugro.kernel.jobs.moves import About

Rig = Callable[[int], EngineRig]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made: list[EngineRig] = []

    def make(nodes: int) -> EngineRig:
        made.append(EngineRig(tmp_path, nodes))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_job_runs_and_its_output_and_exit_code_come_home(rig: Rig) -> None:
    place = rig(1)

    async def work() -> None:
        async with place.agent() as (store, _):
            good = (await store.jobs.submit(command("sh", "-c", "echo hello; echo oops >&2"), "ann", "k1")).job
            bad = (await store.jobs.submit(command("sh", "-c", "echo bye; exit 7"), "ann", "k2")).job
            good, bad = await until(store, good, is_final), await until(store, bad, is_final)
            assert (good.state, good.exit_code) == (JobState.SUCCEEDED, 0)
            assert await place.log(good) == "hello\noops\n"
            assert (bad.state, bad.exit_code) == (JobState.FAILED, 7)
            assert "rank 0 on n1" in bad.reason
            assert await place.log(bad) == "bye\n"

    in_loop(work())


@pytest.mark.proof
def test_small_commands_begin_in_the_folders_of_those_that_are_over(rig: Rig) -> None:
    place, count = rig(1), 120
    script = "stat -c %i $UGRO_RUN_DIR; find . $UGRO_OUTPUT -mindepth 1; echo $0"

    async def work() -> None:
        async with place.agent() as (store, engine):
            wanted = [(command("sh", "-c", script, f"job {one}"), "ann", f"k{one}", About()) for one in range(count)]
            jobs = [submission.job for submission in await store.jobs.submit_many(wanted)]
            engine.wake()
            folders = set()
            for number, job in enumerate(jobs):
                ended = await until(store, job, is_final)
                assert ended.state is JobState.SUCCEEDED
                folder, *rest = (await place.log(ended)).splitlines()
                assert rest == [f"job {number}"], "it finds nothing of the others"
                folders.add(folder)
            assert len(folders) < count * 2 / 3

    in_loop(work())


def test_a_program_that_fails_is_tried_again_as_often_as_allowed(rig: Rig, tmp_path: Path) -> None:
    place = rig(1)
    ledger = tmp_path / "ledger"

    async def work() -> None:
        async with place.agent() as (store, _):
            script = f"echo $UGRO_ATTEMPT >> {ledger}; [ $UGRO_ATTEMPT = 2 ]"
            spec = JobSpec("flaky", ("sh", "-c", script), retry=Retry(max_retries=2, on=("rank_failed",)))
            job = await until(store, (await store.jobs.submit(spec, "ann", "k")).job, is_final)
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)

    in_loop(work())
    assert ledger.read_text() == "1\n2\n"


def test_every_rank_of_a_gang_gets_torchruns_environment(rig: Rig, tmp_path: Path) -> None:
    place = rig(3)
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nprint(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))\n"
        "print(int(os.environ['MASTER_PORT']) > 0, os.environ['UGRO_JOB'], os.environ['CUDA_VISIBLE_DEVICES'] == '')\n"
    )

    async def work() -> None:
        async with place.agent() as (store, _):
            spec = JobSpec("gang", (str(script),), Launcher.DDP, resources=Resources(min_nodes=3, max_nodes=3))
            job = await until(store, (await store.jobs.submit(spec, "ann", "k")).job, is_final)
            assert job.state is JobState.SUCCEEDED, job.reason
            for rank in range(3):
                assert await place.log(job, rank) == f"{rank} 3 0 127.0.0.1\nTrue {job.id} True\n"

    in_loop(work())


def test_a_cancelled_job_ends_with_all_it_started(rig: Rig, tmp_path: Path) -> None:
    place = rig(1)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = (await store.jobs.submit(command("sh", "-c", "setsid sleep 7771 & sleep 7772"), "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            engine.wake()
            assert (await until(store, job, is_final)).state is JobState.CANCELLED
            wait_until(lambda: not place.processes(), 10, "its processes to be gone")

    in_loop(work())


def test_jobs_never_notice_that_their_agent_was_gone(rig: Rig, tmp_path: Path) -> None:
    place = rig(1)
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"

    async def before() -> Job:
        async with place.agent() as (store, _):
            wait = f"until [ -e {gate} ]; do sleep 0.05; done"
            script = f"echo begun >> {ledger}; {wait}; echo done >> {ledger}; echo end"
            job = (await store.jobs.submit(command("sh", "-c", script), "ann", "k")).job
            return await until(store, job, lambda seen: seen.state is JobState.RUNNING)

    async def after(job: Job) -> None:
        async with place.agent() as (store, _):
            again = await store.jobs.submit(command("never", "run"), "ann", "k")
            assert not again.is_new
            assert again.job.id == job.id
            gate.touch()
            ended = await until(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
            assert await place.log(ended) == "end\n"

    job = asyncio.run(before())
    in_loop(after(job))
    assert ledger.read_text() == "begun\ndone\n"
