"""Trainings on three nodes under an agent: a rank is lost, the job goes on, and the event log tells it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, in_loop, submitted, until
from tests.rig.ranks import ROOT
from tests.rig.waiting import processes_with_variable, wait_until
from ugro.kernel.jobs.model import Elastic, Job, JobSpec, JobState, Launcher, Resources, Retry
from ugro.kernel.store.database import Store

pytestmark = [pytest.mark.timeout(400), pytest.mark.proof]

SAMPLES, EPOCHS = 163, 60
_LIMIT_S = 180
THREE = Resources(min_nodes=3, max_nodes=3)


class ElasticRig(EngineRig):
    def _entry(self, name: str, root: str) -> str:
        return super()._entry(name, root).replace("{", f"{{python: {sys.executable}, ", 1)

    def spec(self, elastic: Elastic, *more: str, retries: int = 0) -> JobSpec:
        env = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "LOSE_ONCE": str(self.folder / "lost"),
            "RESULT": str(self.folder / "result_{rank}.json"),
        }
        argv = (str(ROOT / "tests" / "rig" / "elastic.py"), "--epochs", str(EPOCHS), "--pause", "0.002", *more)
        retry = Retry(max_retries=retries)
        return JobSpec(
            "train", argv, Launcher.DDP, env=tuple(env.items()), resources=THREE, elastic=elastic, retry=retry
        )

    def rank(self, number: int) -> int | None:
        """Its process; None if there is none."""
        found = set(self.processes()) & set(processes_with_variable("RANK", [str(number)]))
        scripts = [pid for pid in found if b"rig/elastic.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return scripts[0] if scripts else None

    def steps(self, rank: int) -> int:
        path = self.folder / f"result_{rank}.seen"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def used(self) -> Counter[tuple[int, int]]:
        lines = [json.loads(line) for path in self.folder.glob("*.seen") for line in path.read_text().splitlines()]
        return Counter((epoch, index) for epoch, _, indices, _ in lines for index in indices)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ElasticRig]:
    made = ElasticRig(tmp_path, 3)
    yield made
    made.end()


async def told(store: Store, job: Job) -> list[str]:
    return [one.text for one in await store.jobs.events(job=job.id) if one.kind == "elastic"]


async def final(store: Store, job: Job) -> Job:
    async with asyncio.timeout(_LIMIT_S):
        while not (job := await store.jobs.get(job.id)).is_final:  # noqa: ASYNC110  # nobody is told of rows
            await asyncio.sleep(0.05)
    return job


async def tells(store: Store, job: Job, words: str) -> None:
    async with asyncio.timeout(60):
        while not any(words in text for text in await told(store, job)):  # noqa: ASYNC110  # nobody is told of rows
            await asyncio.sleep(0.05)


def test_a_rank_is_killed_the_job_goes_on_the_rank_comes_back_and_the_job_succeeds(rig: ElasticRig) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            job = await submitted(store, engine, rig.spec(Elastic(1, 60.0)))
            await trains(rig, 2)
            first = rig.rank(2)
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await tells(store, job, "rank 2 on n3 was lost (signal 9); training goes on with 2 of 3 ranks")
            await tells(store, job, "every rank trains again")
            assert rig.rank(2) not in (None, first)
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason
            assert engine.remark(ended) is None

    in_loop(work())
    lost = {key for key, count in (_everything() - rig.used()).items()}
    assert rig.used() - _everything() == Counter(), "samples were used twice"
    assert len(lost) <= 20, "only what the killed rank had no time to write down may be missing"


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_is_lost_for_good_does_not_end_the_job(rig: ElasticRig, lost: int) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            job = await submitted(store, engine, rig.spec(Elastic(1, 60.0, rejoins=0), "--lose", f"{lost}:20:KILL"))
            await tells(store, job, f"rank {lost} on n{lost + 1} was lost (signal 9)")
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason
            assert rig.processes() == []

    in_loop(work())
    assert rig.used() == _everything()


def test_with_too_few_ranks_the_job_is_tried_again_from_its_checkpoint(rig: ElasticRig) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            spec = rig.spec(Elastic(3, 60.0), "--checkpoints", "--lose", "1:30:KILL", retries=2)
            job = await submitted(store, engine, spec)
            job = await until(store, job, lambda seen: seen.state is JobState.RECOVERING)
            texts = [one.text for one in await store.jobs.events(job=job.id)]
            assert any("2 of 3 ranks are left, fewer than min_ranks 3" in text for text in texts), texts
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2), ended.reason

    in_loop(work())


def test_a_rank_that_is_killed_while_its_process_exits_does_not_repeat_the_training(rig: ElasticRig) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            job = await submitted(
                store, engine, rig.spec(Elastic(1, 60.0), "--epochs", "3", "--lingers", "2", retries=2)
            )
            lingers = rig.folder / "result_2.lingers"
            await asyncio.to_thread(wait_until, lingers.exists, 60, "rank 2 to have nothing left to do")
            await asyncio.to_thread(wait_until, lambda: rig.rank(0) is None, 60, "rank 0 to end")
            rank = rig.rank(2)
            assert rank is not None
            os.kill(rank, signal.SIGKILL)
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason

    in_loop(work())


def test_a_supervisor_is_killed_and_the_job_goes_on_without_its_node(rig: ElasticRig) -> None:
    async def work() -> None:
        async with rig.agent() as (store, engine):
            job = await submitted(store, engine, rig.spec(Elastic(1, 60.0)))
            await trains(rig, 2)
            rank = rig.rank(2)
            assert rank is not None
            supervisor = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(supervisor, signal.SIGKILL)
            await tells(store, job, "rank 2 on n3 was lost")
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason

    in_loop(work())


def test_an_agent_that_is_restarted_goes_on_and_tells_nothing_twice(rig: ElasticRig) -> None:
    async def first_agent() -> Job:
        async with rig.agent() as (store, engine):
            job = await submitted(store, engine, rig.spec(Elastic(1, 60.0, rejoins=0), "--lose", "1:20:KILL"))
            await tells(store, job, "rank 1 on n2 was lost (signal 9)")
            return job

    async def second_agent(job: Job) -> None:
        slow = rig.slow("n2")
        slow.touch()  # the node of the rank that was lost answers last
        async with rig.agent() as (store, _):
            async with asyncio.timeout(60):
                while {rig.watch.status(name, job.id, 1) for name in ("n1", "n3")} & {None}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            slow.unlink()
            ended = await final(store, job)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason
            texts = await told(store, job)
            assert len(texts) == len(set(texts))

    async def both() -> None:
        await second_agent(await first_agent())

    in_loop(both())


def _everything() -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))


async def trains(rig: ElasticRig, rank: int) -> None:
    await asyncio.to_thread(wait_until, lambda: rig.steps(rank) > 5, 60, "the training to begin")
