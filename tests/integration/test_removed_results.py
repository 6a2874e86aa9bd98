"""``ugro results --rm`` at the moment at which what a job made comes home: it is gone when all is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, in_loop, is_final, until
from tests.rig.waiting import wait_until
from ugro.agent.checkpoint_home import Checkpoint as CheckpointAtHome
from ugro.agent.checkpoint_home import CheckpointHome
from ugro.agent.checkpoints import Checkpoints, Offer
from ugro.agent.engine import Engine
from ugro.agent.job_results import ResultService
from ugro.agent.result_home import RunHome
from ugro.agent.results import Results, Run
from ugro.core.job import Checkpoint, Job, JobSpec, ResultRule
from ugro.nodes.outputs import Wanted
from ugro.store.database import Store

_SOON_S = 20


class Pause:
    """Something waits at a certain point until it is let go."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self.is_over = asyncio.Event()

    async def __call__(self) -> None:
        self.is_reached.set()
        async with asyncio.timeout(_SOON_S):
            await self.is_over.wait()


class SlowResults(Results):
    pause: Pause

    async def _fetch(self, run: Run, home: RunHome, wanted: Sequence[Wanted], *, is_final: bool) -> None:
        await self.pause()
        await super()._fetch(run, home, wanted, is_final=is_final)


class SlowCheckpoints(Checkpoints):
    pause: Pause

    async def _fetch(self, job: Job, offer: Offer, home: CheckpointHome) -> CheckpointAtHome:
        await self.pause()
        return await super()._fetch(job, offer, home)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    rig = EngineRig(tmp_path, 1)
    rig.results_type, rig.checkpoints_type = SlowResults, SlowCheckpoints
    yield rig
    rig.end()


async def removed_on_its_way(place: EngineRig, store: Store, engine: Engine, spec: JobSpec, pause: Pause) -> Job:
    job = (await store.jobs.submit(spec, "ann", "k")).job
    engine.wake()
    job = await until(store, job, is_final)
    async with asyncio.timeout(_SOON_S):
        await pause.is_reached.wait()
    service = ResultService(place.folder / "jobs", store, place.watch, place.home)
    assert await service.remove(job) == ()
    pause.is_over.set()
    return job


def test_outputs_removed_while_they_come_home_do_not_stay_here_or_there(place: EngineRig) -> None:
    script = "cd $UGRO_OUTPUT; echo weights > model; mkdir checkpoints; echo weights > checkpoints/step_1"
    spec = JobSpec("training", ("sh", "-c", script), results=ResultRule("none"))

    async def work() -> None:
        pause = SlowResults.pause = Pause()
        async with place.agent() as (store, engine):
            job = await removed_on_its_way(place, store, engine, spec, pause)
            await asyncio.to_thread(wait_until, lambda: not place.run_folders("n1"), _SOON_S, "the run to be removed")
            folder = place.folder / "jobs" / str(job.id)
            assert {path.name for path in folder.iterdir()} <= {"attempt_1", "config.json", "logs"}
            assert {path.name for path in (folder / "attempt_1").iterdir()} <= {"logs"}
            assert not list(place.folder.glob("n1/.ugro/agents/*/kept/*"))

    in_loop(work())


def test_checkpoints_removed_while_they_come_home_do_not_stay(place: EngineRig) -> None:
    script = "echo weights > $UGRO_CHECKPOINT_DIR/step_1"
    spec = JobSpec("training", ("sh", "-c", script), checkpoint=Checkpoint(every_s=60.0))

    async def work() -> None:
        pause = SlowCheckpoints.pause = Pause()
        async with place.agent() as (store, engine):
            job = await removed_on_its_way(place, store, engine, spec, pause)
            async with asyncio.timeout(_SOON_S):
                while await store.jobs.to_keep():  # noqa: ASYNC110  # a row in a database tells nobody
                    await asyncio.sleep(0.05)
            assert not (place.folder / "jobs" / str(job.id) / "checkpoints").exists()

    in_loop(work())
