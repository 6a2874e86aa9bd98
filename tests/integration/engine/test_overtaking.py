"""A step that takes its time is overtaken by another: it is held until that is done, and must not undo it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tests.rig.engine import SOON_S, EngineRig, Pause, command, in_loop, is_final, seen_soon, submitted, until
from ugro.kernel.files.node_files import Wanted
from ugro.kernel.files.results.checkpoints import Checkpoint as CheckpointAtHome
from ugro.kernel.files.results.checkpoints import CheckpointStore, CheckpointSync, Offer
from ugro.kernel.files.results.file_store import FileTransfer
from ugro.kernel.files.results.output_store import OutputStore
from ugro.kernel.files.results.output_sync import OutputSync, Run
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Runs, RunStatus
from ugro.kernel.jobs.engine.scheduler_input import Live, SchedulerInput
from ugro.kernel.jobs.model import Checkpoint, Ending, Job, JobSpec, JobState, ResultRule
from ugro.kernel.jobs.scheduling.model import ClusterView
from ugro.kernel.store.database import Store
from ugro.kernel.telemetry.model import Measured
from ugro.node.files.listing import RunFile


class SlowTransfer(FileTransfer):
    pause: ClassVar[Pause]

    async def fetch(self, listed: Sequence[RunFile], wanted: Sequence[Wanted], *, is_final: bool) -> None:
        await self.pause()
        await super().fetch(listed, wanted, is_final=is_final)


class SlowOutputs(OutputSync):
    def _transfer(self, run: Run, store: OutputStore) -> FileTransfer:
        transfer = super()._transfer(run, store)
        return SlowTransfer(transfer.files, transfer.source, transfer.store, transfer.noted)


class SlowCheckpoints(CheckpointSync):
    pause: Pause

    async def _fetch(self, job: Job, offer: Offer, store: CheckpointStore) -> CheckpointAtHome:
        await self.pause()
        return await super()._fetch(job, offer, store)


class SlowRuns(Runs):
    pause: ClassVar[Pause]

    async def stop(self, job: int, attempt: int, reason: str, grace_s: float) -> RunStatus:
        status = await super().stop(job, attempt, reason, grace_s)
        await self.pause()
        return status


class SlowWatch(RunTracker):
    def runs(self, node: str) -> Runs:
        runs = super().runs(node)
        return SlowRuns(runs.node, runs.identity, runs.connect_s, runs.answer_s)


class SlowInput(SchedulerInput):
    pause: Pause
    passes = 0

    async def take(self, live: Live) -> ClusterView:
        SlowInput.passes += 1
        view = await super().take(live)
        if all(node.unusable is None for node in view.nodes):
            await self.pause()
        return view


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    rig = EngineRig(tmp_path, 1)
    yield rig
    rig.end()


async def unmeasured(job: int, attempt: int) -> Measured:
    return Measured()


async def no_energy(job: Job, attempt: int | None) -> None:
    return None


async def removed_on_its_way(place: EngineRig, store: Store, engine: Engine, spec: JobSpec, pause: Pause) -> Job:
    job = await until(store, await submitted(store, engine, spec), is_final)
    await pause.reached()
    service = ResultService(place.folder / "jobs", store, place.watch, place.home, unmeasured, no_energy)
    assert await service.remove(job) == ()
    pause.is_over.set()
    return job


def test_outputs_removed_while_they_come_home_do_not_stay_here_or_there(place: EngineRig) -> None:
    script = "cd $UGRO_OUTPUT; echo weights > model; mkdir checkpoints; echo weights > checkpoints/step_1"
    spec = JobSpec("training", ("sh", "-c", script), results=ResultRule("none"))

    async def work() -> None:
        pause = SlowTransfer.pause = Pause()
        place.results_type = SlowOutputs
        async with place.agent() as (store, engine):
            job = await removed_on_its_way(place, store, engine, spec, pause)
            await seen_soon(lambda: not place.run_folders("n1"), "the run to be removed")
            folder = place.folder / "jobs" / str(job.id)
            assert {path.name for path in folder.iterdir()} <= {"attempt_1", "config.json", "logs"}
            assert {path.name for path in (folder / "attempt_1").iterdir()} <= {"logs"}
            assert not list(place.folder.glob("n1/.ugro/agents/*/kept/*"))

    in_loop(work())


@pytest.mark.proof
def test_checkpoints_removed_while_they_come_home_do_not_stay(place: EngineRig) -> None:
    script = "echo weights > $UGRO_CHECKPOINT_DIR/step_1"
    spec = JobSpec("training", ("sh", "-c", script), checkpoint=Checkpoint(every_s=60.0))

    async def work() -> None:
        pause = SlowCheckpoints.pause = Pause()
        place.checkpoints_type = SlowCheckpoints
        async with place.agent() as (store, engine):
            job = await removed_on_its_way(place, store, engine, spec, pause)
            async with asyncio.timeout(SOON_S):
                while await store.jobs.to_keep():  # noqa: ASYNC110  # a row in a database tells nobody
                    await asyncio.sleep(0.05)
            assert not (place.folder / "jobs" / str(job.id) / "checkpoints").exists()

    in_loop(work())


def test_the_answer_to_a_stop_that_comes_after_the_run_was_removed_does_not_bring_it_back(place: EngineRig) -> None:
    async def work() -> None:
        pause = SlowRuns.pause = Pause()
        place.watch_type = SlowWatch
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, command("sleep", "7788"))
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            engine.wake()
            await pause.reached()
            assert (await until(store, job, is_final)).state is JobState.CANCELLED
            await seen_soon(lambda: place.watch.status("n1", job.id, 1) is None, "the run to be removed")
            (stop,) = [task for task in asyncio.all_tasks() if task.get_name() == f"stop {job.id} 1 n1"]
            pause.is_over.set()
            async with asyncio.timeout(SOON_S):
                await stop
            assert place.watch.status("n1", job.id, 1) is None

    in_loop(work())


@pytest.mark.proof
def test_no_job_starts_on_a_node_that_was_drained_while_it_was_decided_where(place: EngineRig) -> None:
    async def work() -> None:
        pause = SlowInput.pause = Pause()
        place.scheduler_input_type = SlowInput
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, command("true"))
            await pause.reached()
            passes = SlowInput.passes
            await store.drain("n1", "new fans")
            pause.is_over.set()
            await seen_soon(lambda: SlowInput.passes > passes, "it to be placed anew")
            assert (await store.jobs.get(job.id)).state is JobState.QUEUED
            await store.resume("n1")
            assert (await until(store, job, is_final)).state is JobState.SUCCEEDED

    in_loop(work())
