"""Jobs and a disk without room, with real node programs on a disk that a test can fill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, until
from tests.rig import disk
from tests.rig.disk import SmallDisk
from tests.rig.engine import EngineRig, command, gated, is_final, running, soon, submitted
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.model import Cause, Disconnect, Failure, Job, JobState, OnLost
from ugro.kernel.store.database import Store

MIB = 2**20
Place = tuple[EngineRig, SmallDisk, Store, Engine]


@asynccontextmanager
async def agent_with_small_disk(folder: Path, nodes: int, size: int) -> AsyncIterator[Place]:
    """The disk of n1."""
    if (reason := disk.available()) is not None:
        pytest.skip(reason)
    rig = EngineRig(folder, nodes)
    small = SmallDisk(folder / "n1", size)
    small.mount()
    try:
        async with rig.agent() as (store, engine):
            yield rig, small, store, engine
    finally:
        rig.end()
        small.unmount()


async def failure_of(store: Store, job: Job) -> Failure:
    failure = (await store.jobs.attempts(job.id))[-1].failure
    assert failure is not None
    return failure


@in_loop
async def test_a_full_disk_is_the_cause_at_once(tmp_path: Path) -> None:
    async with agent_with_small_disk(tmp_path, 1, 80 * MIB) as (rig, small, store, engine):
        source = tmp_path / "source"
        source.mkdir()
        (source / "train.py").write_text("print('trains')\n" + "#" * 3 * MIB)
        (tmp_path / "home").mkdir()
        taken = await rig.code.take(source)
        (small.folder / "ballast").write_bytes(bytes(52 * MIB))
        spec = replace(command("python3", "train.py"), snapshot=taken.id)
        ended = await soon(store, await submitted(store, engine, spec, "a"), is_final)
        failure = await failure_of(store, ended)
        assert (ended.state, ended.attempt, failure.cause, failure.node) == (JobState.FAILED, 1, Cause.DISK_FULL, "n1")
        assert failure.reason.startswith(f"n1: the disk of {small.folder} is full: 2")
        assert failure.reason.endswith(" MiB free; the code needs 3.0 MiB, and 64.0 MiB are kept free")
        assert failure.hint == "make room: ugro node gc n1, or see what takes it: ugro exec n1 -- df -h"


@in_loop
async def test_a_program_that_dies_of_a_full_disk_is_told_from_one_that_fails(tmp_path: Path) -> None:
    """Its log is on that disk, too, and stays empty."""
    async with agent_with_small_disk(tmp_path, 1, 8 * MIB) as (_, small, store, engine):
        gate = tmp_path / "gate"
        fails = f"{gated(gate)}; echo this line cannot be written; exit 1"
        job, _ = await running(store, await submitted(store, engine, command("sh", "-c", fails), "a"))
        small.fill()
        gate.touch()
        ended = await soon(store, job, is_final)
        failure = await failure_of(store, ended)
        assert (failure.cause, failure.exit_code, failure.last_lines) == (Cause.DISK_FULL, 1, ())
        assert failure.reason.startswith("rank 0 on n1 ended with exit code 1: the disk of the node is full")
        # What the first has left is made into a folder for the next small command; one with a lease gets its own.
        await until(lambda: not list(small.folder.glob(f"**/runs/{job.id}.1")), 30, "its run to be removed")
        small.fill()
        own = replace(command("true"), disconnect=Disconnect(on_lost=OnLost.RESTART))
        next_one = await soon(store, await submitted(store, engine, own, "b"), is_final)
        assert (await failure_of(store, next_one)).cause is Cause.DISK_FULL, "not even a run can be set up"
        small.free()
        again = await soon(store, await submitted(store, engine, command("true"), "c"), is_final)
        assert again.state is JobState.SUCCEEDED


@in_loop
async def test_a_node_without_room_gets_no_job_while_another_has_room(tmp_path: Path) -> None:
    async with agent_with_small_disk(tmp_path, 2, 80 * MIB) as (rig, _, store, engine):
        await rig.scheduler_input.first_answers()
        jobs = [await submitted(store, engine, command("true"), str(number)) for number in range(4)]
        ended = [await soon(store, job, is_final) for job in jobs]
        assert {job.placement.nodes for job in ended if job.placement} == {("n2",)}
