"""The reconcile loop on real node programs of this machine: jobs run, fail, are cancelled, and survive its death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.rig.waiting import processes_with_variable, wait_until
from ugro.agent.cluster import Cluster
from ugro.agent.engine import Engine
from ugro.agent.health import HealthCheck
from ugro.agent.launching import Launching
from ugro.agent.logmirror import LogMirror
from ugro.agent.runwatch import RunWatch
from ugro.agent.snapshot import Snapshots
from ugro.core.job import Ending, Job, JobSpec, JobState, Launcher, Resources, Retry
from ugro.nodes.runs import Identity
from ugro.store.database import Store

_LIMIT_S = 40


class Rig:
    """An engine with all it needs, as an agent would make it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        names = [f"n{number}" for number in range(1, nodes + 1)]
        lines = [f"  {name}: {{transport: local, remote_root: {folder}/{name}}}" for name in names]
        self.file = folder / "cluster.yaml"
        self.file.write_text("nodes:\n" + "\n".join(lines) + "\n")

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[tuple[Store, Engine]]:
        store = Store(self.folder / "state.db")
        await store.open()
        cluster = Cluster(self.file)
        await cluster.start()
        watch = RunWatch(cluster.inventory, Identity(await store.agent_id(), await store.next_generation()))
        snapshots = Snapshots(store.jobs, cluster, HealthCheck(cluster, store))
        mirror = LogMirror(self.folder / "jobs", watch)
        engine = Engine(store.jobs, watch, Launching(store.jobs, cluster, watch), snapshots, mirror)
        task = asyncio.create_task(engine.run())
        try:
            yield store, engine
        finally:
            task.cancel()
            await asyncio.wait([task])
            await engine.close()
            await cluster.inventory.close()
            await store.close()

    def log(self, job: Job, rank: int = 0) -> str:
        return (self.folder / "jobs" / str(job.id) / f"attempt_{job.attempt}" / "logs" / f"rank_{rank}.log").read_text()


@pytest.fixture
def rig(tmp_path: Path) -> Callable[[int], Rig]:
    return lambda nodes: Rig(tmp_path, nodes)


def command(*argv: str, name: str = "job", retries: int = 0) -> JobSpec:
    return JobSpec(name=name, argv=argv, retry=Retry(max_retries=retries))


async def until(store: Store, job: Job, is_so: Callable[[Job], bool]) -> Job:
    async with asyncio.timeout(_LIMIT_S):
        while not is_so(job := await store.jobs.get(job.id)):  # noqa: ASYNC110  # a row in a database tells nobody
            await asyncio.sleep(0.05)
    return job


def is_final(job: Job) -> bool:
    return job.is_final


def in_loop(work: Awaitable[None]) -> None:
    async def run() -> None:
        await work

    asyncio.run(run())


def test_a_job_runs_and_its_output_and_exit_code_come_home(rig: Callable[[int], Rig]) -> None:
    place = rig(1)

    async def work() -> None:
        async with place.agent() as (store, _):
            good = (await store.jobs.submit(command("sh", "-c", "echo hello; echo oops >&2"), "ann", "k1")).job
            bad = (await store.jobs.submit(command("sh", "-c", "echo bye; exit 7"), "ann", "k2")).job
            good, bad = await until(store, good, is_final), await until(store, bad, is_final)
            assert (good.state, good.exit_code) == (JobState.SUCCEEDED, 0)
            assert place.log(good) == "hello\noops\n"
            assert (bad.state, bad.exit_code) == (JobState.FAILED, 7)
            assert "rank 0 on n1" in bad.reason
            assert place.log(bad) == "bye\n"

    in_loop(work())


def test_a_program_that_fails_is_tried_again_as_often_as_allowed(rig: Callable[[int], Rig], tmp_path: Path) -> None:
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


def test_every_rank_of_a_gang_gets_torchruns_environment(rig: Callable[[int], Rig], tmp_path: Path) -> None:
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
                assert place.log(job, rank) == f"{rank} 3 0 127.0.0.1\nTrue {job.id} True\n"

    in_loop(work())


def test_a_cancelled_job_ends_with_all_it_started(rig: Callable[[int], Rig], tmp_path: Path) -> None:
    place = rig(1)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = (await store.jobs.submit(command("sh", "-c", "setsid sleep 7771 & sleep 7772"), "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            engine.wake()
            assert (await until(store, job, is_final)).state is JobState.CANCELLED
            wait_until(lambda: not processes_with_variable("UGRO_JOB", [str(job.id)]), 10, "its processes to be gone")

    in_loop(work())


def test_jobs_never_notice_that_their_agent_was_gone(rig: Callable[[int], Rig], tmp_path: Path) -> None:
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
            assert place.log(ended) == "end\n"

    job = asyncio.run(before())
    in_loop(after(job))
    assert ledger.read_text() == "begun\ndone\n"
