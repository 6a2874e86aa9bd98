"""What takes its time in the agent, and what happens meanwhile: starts that wait, a database that hangs, edits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.rig.engine import (
    EngineRig,
    asked_to_end,
    command,
    gated,
    in_loop,
    is_final,
    leased,
    renewed,
    running,
    seen_soon,
    soon,
    submitted,
)
from ugro.kernel.files.code.service import Code
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.model import JobSpec, JobState, Launcher


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    rig = EngineRig(tmp_path, 1)
    yield rig
    rig.end()


# --- starts that wait -----------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_job_whose_start_waits_is_over_when_that_was_given_up(
    place: EngineRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code waits for its turn while the link breaks, and it is cancelled: nobody was ever asked to start it."""
    begun, is_cancelled = asyncio.Event(), asyncio.Event()

    async def bring(self: Code, snapshot: str | None, nodes: Iterable[str]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    monkeypatch.setattr(Code, "bring", bring)
    monkeypatch.setattr("ugro.kernel.jobs.engine.run_tracker._SILENT_S", 0.1)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, command("sh", "-c", f"touch {tmp_path}/ran; sleep 7791"))
            await asyncio.wait_for(begun.wait(), 9)
            place.cut("n1")
            await asked_to_end(store, engine, job)
            job = await soon(store, job, is_final)
            assert job.state is JobState.CANCELLED
            assert is_cancelled.is_set(), "a start that goes on may still begin something"
            place.heal("n1")
            await seen_soon(lambda: not place.processes() and not place.run_folders("n1"), "nothing to be left")
            assert not (tmp_path / "ran").exists()

    in_loop(work())


@pytest.mark.proof
def test_a_start_that_takes_its_time_has_it_also_under_another_agent(
    place: EngineRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ugro.kernel.jobs.engine.launch._START_S", 4.0)
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    spec = JobSpec("train", (str(script),), Launcher.DDP, setup=f"echo >> {begun}; {gated(gate)}")

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, spec)
            await seen_soon(begun.exists, "the set-up to begin")
        async with place.agent() as (store, _):
            await asyncio.sleep(6)  # longer than ranks have to start
            job = await store.jobs.get(job.id)
            assert (job.state, job.attempt) == (JobState.STARTING, 1), job.reason
            gate.touch()
            job = await soon(store, job, is_final)
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)

    in_loop(work())


# --- leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_lease_is_kept_while_the_database_hangs(place: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, goes_on = LiveJobs.read, asyncio.Event()
    goes_on.set()

    async def read(self: LiveJobs) -> None:
        await goes_on.wait()
        await reads(self)

    monkeypatch.setattr(LiveJobs, "read", read)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, node = await running(store, await submitted(store, engine, leased(4.0, "sleep", "7792")))
            goes_on.clear()
            await renewed(place, node, 4.0)
            goes_on.set()
            later = await submitted(store, engine, command("true"), "later")
            await soon(store, later, is_final)
            job = await store.jobs.get(job.id)
            assert (job.state, job.attempt) == (JobState.RUNNING, 1), job.reason
            assert place.processes()

    in_loop(work())


# --- a node's name that leads elsewhere -------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_job_goes_on_where_it_is_when_its_nodes_name_leads_elsewhere(place: EngineRig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, command("sh", "-c", gated(gate), retries=1)))
            await place.lead_to("n1", "other")
            job = await soon(store, job, lambda seen: seen.state is not JobState.RUNNING)
            assert (job.state, job.attempt) == (JobState.UNREACHABLE, 1)
            assert "another machine or folder" in str(job.reason)
            other = await submitted(store, engine, command("true"), "other")
            assert (await soon(store, other, is_final)).state is JobState.SUCCEEDED
            assert (await store.jobs.get(job.id)).state is JobState.UNREACHABLE
        async with place.agent() as (store, engine):  # one that never knew the old folder
            later = await submitted(store, engine, command("true"), "later")
            await soon(store, later, is_final)
            assert (await store.jobs.get(job.id)).state is JobState.UNREACHABLE
            assert place.processes(1)
            await place.lead_to("n1", "n1")
            await running(store, job)
            gate.touch()
            job = await soon(store, job, is_final)
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)

    in_loop(work())


def test_a_job_whose_nodes_name_leads_elsewhere_can_be_cancelled(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, command("sleep", "7793")))
            await place.lead_to("n1", "other")
            await soon(store, job, lambda seen: seen.state is JobState.UNREACHABLE)
            await asked_to_end(store, engine, job)
            ended = await soon(store, job, is_final)
            assert ended.state is JobState.CANCELLED
            assert place.processes(1), "nobody could be asked to end it"
            assert "n1 cannot be asked" in ended.reason, "and nobody is told that it has ended"
            await place.lead_to("n1", "n1")
            await seen_soon(lambda: not place.processes(), "what was left there to be swept")

    in_loop(work())


@pytest.mark.proof
def test_a_leased_job_starts_elsewhere_when_its_old_place_has_ended_it(
    place: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ugro.kernel.jobs.engine.leases._MARGIN_S", 5.0)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, leased(2.0, "sleep", "7794")))
            await place.lead_to("n1", "other")
            await soon(store, job, lambda seen: seen.state is JobState.UNREACHABLE)
            assert place.processes(1)
            again = await soon(store, job, lambda seen: seen.state is not JobState.UNREACHABLE)
            assert again.attempt == 1
            assert not place.processes(1), "it was given up before its lease had ended it"

    in_loop(work())
