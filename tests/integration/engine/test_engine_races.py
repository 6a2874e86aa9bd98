"""Interleavings and mishaps between the engine, its database and the nodes that must neither lose nor repeat a job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.engine import (
    SOON_S,
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
from ugro.kernel.jobs.model import Checkpoint, Ending, Job, JobSpec, JobState, Launcher, Resources, Retry
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotFound

_HUGE = "9" * 30


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    rig = EngineRig(tmp_path, 2)
    yield rig
    rig.end()


class Clock:
    """The clock that goes on while a machine sleeps; a test can let it go on by itself."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in ("tracking.run_tracker", "engine.leases"):
        monkeypatch.setattr(f"ugro.kernel.agent.{module}.boot_clock_s", found)
    return found


def change_database(place: EngineRig, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(place.folder / "state.db", timeout=5)) as db, db:
        db.execute(statement, values)


def forbid(place: EngineRig, state: JobState, job: int) -> None:
    """From now on this move cannot be written down, as on a disk that is full."""
    change_database(
        place,
        f"CREATE TRIGGER refused BEFORE UPDATE ON jobs WHEN NEW.state = '{state}' AND NEW.id = {job} "
        "BEGIN SELECT RAISE(ABORT, 'no space left'); END",
    )


async def used_cpu_s(seconds: float) -> float:
    before = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - before


def has_ended_on_its_node(place: EngineRig, job: Job) -> bool:
    return any(place.folder.glob(f"*/.ugro/agents/*/runs/{job.id}.{job.attempt}/exit.json"))


def checkpoints_on_nodes(place: EngineRig) -> list[Path]:
    agents = list(place.folder.glob("n?/.ugro/agents/*"))
    in_runs = [path for agent in agents for path in agent.glob("runs/*/*/checkpoints/*")]
    return [*in_runs, *(path for agent in agents for path in agent.glob("checkpoints/*"))]


# --- the database ---------------------------------------------------------------------------------------------------


def test_a_number_that_no_job_can_have_is_not_found_and_the_database_goes_on(tmp_path: Path) -> None:
    async def work() -> None:
        store = Store(tmp_path / "state.db")
        await store.open()
        async with asyncio.timeout(3):
            with pytest.raises(NotFound):
                await store.jobs.find(_HUGE)
            assert await store.jobs.newest(1) == []
        await store.close()

    in_loop(work())


@pytest.mark.proof
def test_a_folder_on_a_node_whose_number_no_job_can_have_stops_nothing(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            first = await submitted(store, engine, command("true"), "k1")
            await soon(store, first, is_final)
            runs = next(place.folder.glob("*/.ugro/agents/*/runs"))
            (runs / f"{_HUGE}.1").mkdir()
            node = runs.relative_to(place.folder).parts[0]
            assert place.cluster is not None
            known = place.cluster.inventory.get(node)
            before = known.link
            place.cut(node)  # so that it is told with the first picture
            place.heal(node)
            await seen_soon(lambda: known.link is not None and known.link is not before, "the node to be back")
            second = await submitted(store, engine, command("true"), "k2")
            assert (await soon(store, second, is_final)).state is JobState.SUCCEEDED

    in_loop(work())


def test_a_job_that_cannot_be_read_does_not_hold_up_the_others(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            bad, _ = await running(store, await submitted(store, engine, command("sleep", "7782"), "k1"))
            text = json.dumps({"name": "bad", "argv": ["sleep", "7782"], "launcher": "of a newer version"})
            change_database(place, "UPDATE jobs SET spec = ? WHERE id = ?", text, bad.id)
            good = await submitted(store, engine, command("true"), "k2")
            assert (await soon(store, good, is_final)).state is JobState.SUCCEEDED

    in_loop(work())


@pytest.mark.proof
def test_what_cannot_be_written_of_one_job_costs_no_other_its_lease(place: EngineRig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def work() -> None:
        async with place.agent() as (store, engine):
            ends, _ = await running(store, await submitted(store, engine, command("sh", "-c", gated(gate)), "k1"))
            stays, node = await running(store, await submitted(store, engine, leased(2.0, "sleep", "7783"), "k2"))
            forbid(place, JobState.SUCCEEDED, ends.id)
            gate.touch()
            await seen_soon(lambda: has_ended_on_its_node(place, ends), "the first job to end")
            await renewed(place, node, 2.0)
            stays = await store.jobs.get(stays.id)
            assert (stays.state, stays.attempt) == (JobState.RUNNING, 1)
            assert not has_ended_on_its_node(place, stays), "its lease was not renewed"

    in_loop(work())


@pytest.mark.proof
def test_an_end_that_cannot_be_written_down_is_tried_again_at_leisure(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            forbid(place, JobState.SUCCEEDED, 1)
            job = await submitted(store, engine, command("true"))
            await soon(store, job, lambda _: any(place.folder.glob("*/.ugro/agents/*/runs/*/exit.json")))
            assert await used_cpu_s(3) < 1.0
            assert not (await store.jobs.get(job.id)).is_final
            change_database(place, "DROP TRIGGER refused")
            job = await soon(store, job, is_final)
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)

    in_loop(work())


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_job_too_large_to_be_told_to_a_node_is_given_up_and_not_tried_without_pause(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, command("echo", *["x" * 100_000] * 12))
            await soon(store, job, lambda seen: seen.attempt == 1)
            assert await used_cpu_s(3) < 1.0
            await soon(store, job, lambda seen: seen.state in (JobState.RECOVERING, JobState.FAILED))

    in_loop(work())


@pytest.mark.proof
def test_a_start_under_way_ends_with_its_attempt_and_starts_nothing_later(place: EngineRig, tmp_path: Path) -> None:
    """The setup on one node takes its time; the other node, never asked to start, is away and counts as gone."""
    gate, script = tmp_path / "gate", tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(7787)\n")
    setup = f"touch {tmp_path}/$UGRO_NODE.begun; [ $UGRO_NODE = n2 ] || {gated(gate)}"
    gang = JobSpec(
        "gang", (str(script),), Launcher.DDP, setup=setup, resources=Resources(min_nodes=2, max_nodes=2)
    )

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, gang)
            await seen_soon(lambda: (tmp_path / "n1.begun").exists() and (tmp_path / "n2.begun").exists(), "the setup")
            await asyncio.sleep(0.5)  # the setup of n2 has been answered
            place.cut("n2")
            await asked_to_end(store, engine, job)
            assert (await soon(store, job, is_final)).state is JobState.CANCELLED
            place.heal("n2")
            assert place.cluster is not None
            n2 = place.cluster.inventory.get("n2")
            await seen_soon(lambda: n2.link is not None, "the node to be back")
            gate.touch()
            async with asyncio.timeout(SOON_S):
                while any(task.get_name() == f"start {job.id} 1" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await seen_soon(lambda: not place.run_folders("n2"), "what was started too late to be cleared away")
            logs = tmp_path / "jobs" / str(job.id) / "attempt_1" / "logs"
            assert not list(logs.glob("rank_*")), "a rank of a cancelled job was started"

    in_loop(work())


# --- cancelling, preempting, time limits ----------------------------------------------------------------------------


@pytest.mark.proof
def test_a_cancel_while_an_attempt_is_concluded_is_not_forgotten(place: EngineRig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spec = JobSpec(
        "training",
        ("sh", "-c", f"{gated(gate)}; exit 3"),
        checkpoint=Checkpoint(every_s=60.0),
        retry=Retry(max_retries=1),
    )

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, node = await running(store, await submitted(store, engine, spec))
            seen = engine.changed.count
            gate.touch()
            assert await engine.changed.wait(seen, 10)
            place.cut(node)  # its checkpoints are asked for in vain, again and again
            await asyncio.sleep(2)
            await asked_to_end(store, engine, job)
            assert (await store.jobs.get(job.id)).ending is Ending.CANCELLED
            place.heal(node)
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.CANCELLED, 1)

    in_loop(work())


@pytest.mark.parametrize(
    ("state", "ending"), [(JobState.RUNNING, None), (JobState.STOPPING, Ending.FAILED)], ids=["runs", "fails"]
)
def test_a_cancel_between_a_look_at_a_job_and_its_move_is_not_forgotten(
    place: EngineRig, tmp_path: Path, state: JobState, ending: Ending | None
) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            spec = JobSpec("prepared", ("sleep", "7784"), setup=gated(tmp_path / "gate"))
            job = await submitted(store, engine, spec)
            looked_at = await soon(store, job, lambda seen: seen.state is JobState.STARTING)
            cancel = store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            await asyncio.gather(cancel, engine._move(looked_at, state, "as it looked", ending))
            assert (await store.jobs.get(job.id)).ending is Ending.CANCELLED
            (tmp_path / "gate").touch()

    in_loop(work())


@pytest.mark.proof
def test_a_job_asked_to_make_way_when_it_holds_nothing_is_tried_again(place: EngineRig) -> None:
    """The victim was chosen while it held devices, and its attempt ended by itself before it could be asked."""

    async def work() -> None:
        async with place.agent() as (store, engine):
            spec = command("sh", "-c", "[ $UGRO_ATTEMPT = 2 ] || kill -9 $$")
            job = await submitted(store, engine, spec)
            job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            await asked_to_end(store, engine, job, Ending.PREEMPTED)
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)

    in_loop(work())


def test_a_job_that_had_ended_well_before_it_was_to_make_way_is_not_run_again(place: EngineRig, tmp_path: Path) -> None:
    gate, ledger = tmp_path / "gate", tmp_path / "ledger"

    async def work() -> None:
        async with place.agent() as (store, engine):
            spec = command("sh", "-c", f"echo begun >> {ledger}; {gated(gate)}")
            job, node = await running(store, await submitted(store, engine, spec))
            place.cut(node)
            gate.touch()
            await seen_soon(lambda: has_ended_on_its_node(place, job), "it to end by itself")
            await asked_to_end(store, engine, job, Ending.PREEMPTED)
            place.heal(node)
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)

    in_loop(work())
    assert ledger.read_text() == "begun\n"


@pytest.mark.proof
def test_a_job_that_ended_well_in_time_while_no_agent_looked_has_succeeded(place: EngineRig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spec = JobSpec("limited", ("sh", "-c", gated(gate)), time_limit_s=3.0)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, spec))
        gate.touch()
        await seen_soon(lambda: has_ended_on_its_node(place, job), "it to end by itself")
        await asyncio.sleep(3.5)
        async with place.agent() as (store, _):
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.reason) == (JobState.SUCCEEDED, "every rank ended with 0")

    in_loop(work())


# --- leases and lost nodes ------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_lease_counts_from_the_start_and_not_from_what_an_idle_node_last_said(
    place: EngineRig, clock: Clock
) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            await soon(store, await submitted(store, engine, command("true"), "k1"), is_final)
            await seen_soon(lambda: not place.run_folders("n1") + place.run_folders("n2"), "all to be cleared away")
            await asyncio.sleep(0.5)  # the last word about that is heard
            clock.ahead_s += 3600  # a quiet hour
            job, node = await running(store, await submitted(store, engine, leased(60.0, "sleep", "7785"), "k2"))
            place.cut(node)
            await soon(store, job, lambda seen: seen.state is not JobState.RUNNING)
            later = await submitted(store, engine, command("true"), "k3")
            await soon(store, later, is_final)
            now = await store.jobs.get(job.id)
            assert now.state is JobState.UNREACHABLE, f"given up while it runs: {now.reason}"
            assert place.processes(attempt=1)

    in_loop(work())


@pytest.mark.proof
def test_the_logs_of_a_run_whose_supervisor_died_while_its_node_was_away_come_home(
    place: EngineRig, clock: Clock, tmp_path: Path
) -> None:
    gate, said = tmp_path / "gate", tmp_path / "said"
    script = f"echo early; {gated(gate)}; echo late; touch {said}; sleep 7786"

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, node = await running(store, await submitted(store, engine, leased(60.0, "sh", "-c", script)))
            home = tmp_path / "jobs" / str(job.id) / "attempt_1" / "logs" / "rank_0.log"
            await seen_soon(lambda: home.exists() and home.read_text() == "early\n", "the first line")
            place.cut(node)
            gate.touch()
            await seen_soon(said.exists, "the second line")
            (state,) = place.folder.glob(f"{node}/.ugro/agents/*/runs/{job.id}.1/state.json")
            os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)
            await soon(store, job, lambda seen: seen.state is JobState.UNREACHABLE)
            clock.ahead_s += 1000  # the lease is over
            await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            place.heal(node)
            await seen_soon(lambda: f"{job.id}.1" not in place.run_folders(node), "the lost run to be cleared away")
            assert home.read_text() == "early\nlate\n"

    in_loop(work())


# --- what is left behind --------------------------------------------------------------------------------------------


def test_the_last_checkpoint_comes_home_also_when_the_agent_ends_right_after_the_job(
    place: EngineRig, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"{gated(gate)}; echo weights > $UGRO_CHECKPOINT_DIR/step_1"
    spec = JobSpec("training", ("sh", "-c", script), checkpoint=Checkpoint(every_s=60.0))

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, spec))
            gate.touch()
            while not job.is_final:
                seen = engine.changed.count
                job = await store.jobs.get(job.id)
                if not job.is_final:
                    assert await engine.changed.wait(seen, 10)
        assert job.state is JobState.SUCCEEDED
        async with place.agent():
            home = tmp_path / "jobs" / str(job.id) / "attempt_1" / "output" / "checkpoints"
            await seen_soon(lambda: list(home.glob("*")), "the checkpoint to come home")
            await seen_soon(lambda: not checkpoints_on_nodes(place), "the node's copy to go")

    in_loop(work())


def test_a_job_cancelled_between_attempts_leaves_no_checkpoints_on_nodes(place: EngineRig) -> None:
    script = "echo weights > $UGRO_CHECKPOINT_DIR/step_1; kill -9 $$"
    spec = JobSpec("training", ("sh", "-c", script), checkpoint=Checkpoint(every_s=60.0))

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, spec)
            job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            assert checkpoints_on_nodes(place), "there is nothing to be left"
            await asked_to_end(store, engine, job)
            ended = await soon(store, job, is_final)
            assert ended.state is JobState.CANCELLED
            await seen_soon(lambda: not checkpoints_on_nodes(place), "its checkpoints to go")

    in_loop(work())


def test_a_job_cancelled_between_attempts_is_not_said_to_have_never_started(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await submitted(store, engine, command("sh", "-c", "kill -9 $$"))
            job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            await asked_to_end(store, engine, job)
            assert "before it started" not in (await soon(store, job, is_final)).reason

    in_loop(work())
