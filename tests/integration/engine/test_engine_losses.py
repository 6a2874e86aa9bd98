"""What becomes of jobs when nodes cannot be reached, supervisors die and programs cannot be started."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, command, in_loop, is_final, until
from tests.rig.waiting import parent_of, signal_all, wait_until
from ugro.kernel.jobs.model import Cause, Ending, Job, JobSpec, JobState, Launcher, Resources


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    rig = EngineRig(tmp_path, 2)
    yield rig
    rig.end()


def gated(ledger: Path, gate: Path) -> str:
    """Notes when it begins and ends; ends when the gate is opened."""
    return f"echo $UGRO_NODE begun >> {ledger}; until [ -e {gate} ]; do sleep 0.05; done; echo done >> {ledger}"


@pytest.mark.proof
def test_a_job_goes_on_while_its_node_is_away_and_its_end_is_read_when_it_is_back(
    place: EngineRig, tmp_path: Path
) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"

    async def work() -> None:
        async with place.agent() as (store, _):
            spec = command("sh", "-c", f"{gated(ledger, gate)}; seq 1000")
            job = (await store.jobs.submit(spec, "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            assert job.placement is not None
            node = job.placement.nodes[0]
            place.cut(node)
            away = await until(store, job, lambda seen: seen.state is JobState.UNREACHABLE)
            assert node in away.reason
            gate.touch()
            wait_until(lambda: "done" in ledger.read_text(), 20, "the job to end by itself")
            assert (await store.jobs.get(job.id)).state is JobState.UNREACHABLE
            place.heal(node)
            ended = await until(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
            assert (await place.log(ended)).split() == [str(number) for number in range(1, 1001)]

    in_loop(work())
    assert ledger.read_text().count("begun") == 1


@pytest.mark.proof
def test_a_node_that_is_back_takes_jobs_once_it_has_said_what_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link is open and its report is fresh long before its runs are asked for again."""
    for name, value in {"_AGAIN_S": 3.0, "_LONGEST_AGAIN_S": 3.0, "_CONNECT_S": 0.05, "_SILENT_S": 0.1}.items():
        monkeypatch.setattr(f"ugro.kernel.jobs.engine.run_tracker.{name}", value)
    place = EngineRig(tmp_path, 1)

    async def work() -> None:
        async with place.agent() as (store, engine):
            first = (await store.jobs.submit(command("true"), "ann", "first")).job
            await until(store, first, is_final)
            place.cut("n1")
            second = (await store.jobs.submit(command("true"), "ann", "second")).job
            engine.wake()
            await asyncio.sleep(1.0)  # it is silent by now
            place.heal("n1")
            ended = await until(store, second, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.reason

    try:
        in_loop(work())
    finally:
        place.end()


def test_a_cancelled_job_is_not_over_before_its_silent_node_is_asked(place: EngineRig, tmp_path: Path) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job = (await store.jobs.submit(command("sleep", "7781"), "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            assert job.placement is not None
            place.cut(job.placement.nodes[0])
            await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            engine.wake()
            await until(store, job, lambda seen: seen.state is JobState.STOPPING)
            assert place.processes()
            place.heal(job.placement.nodes[0])
            assert (await until(store, job, is_final)).state is JobState.CANCELLED
            assert not place.processes()

    in_loop(work())


@pytest.mark.proof
@pytest.mark.parametrize("with_reaper", [False, True])
def test_a_killed_supervisor_is_noticed_and_the_job_is_tried_again_free_of_charge(
    place: EngineRig, tmp_path: Path, with_reaper: bool
) -> None:
    ledger = tmp_path / "ledger"
    script = f"echo $UGRO_ATTEMPT >> {ledger}; [ $UGRO_ATTEMPT = 1 ] && sleep 600; true"

    async def work() -> None:
        async with place.agent() as (store, _):
            job = (await store.jobs.submit(command("sh", "-c", script), "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            (state,) = place.folder.glob(f"*/.ugro/agents/*/runs/{job.id}.1/state.json")
            supervisor = json.loads(state.read_text())["pid"]
            doomed = [supervisor, *([parent_of(supervisor)] if with_reaper else [])]
            signal_all(signal.SIGSTOP, doomed)  # at one instant: each would see the other go
            signal_all(signal.SIGKILL, doomed)
            ended = await until(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
            assert (ended.tries.charged, ended.tries.free) == (0, 1)
            first, _ = await store.jobs.attempts(job.id)
            assert first.failure is not None
            assert first.failure.cause is Cause.SUPERVISOR_LOST
            [node] = first.placement.nodes
            assert (f"may still run on {node}" in (first.failure.hint or "")) == with_reaper

    in_loop(work())
    assert ledger.read_text() == "1\n2\n"


def test_a_program_that_is_not_there_fails_once_and_says_so(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, _):
            job = (await store.jobs.submit(command("no-such-program-here"), "ann", "k")).job
            job = await until(store, job, is_final)
            assert (job.state, job.attempt, job.exit_code) == (JobState.FAILED, 1, 127)
            assert "no-such-program-here" in job.reason

    in_loop(work())


def test_when_one_rank_of_a_gang_fails_the_others_end_and_it_is_named(place: EngineRig, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('about to fail', flush=True)\n"
        "    sys.exit('ValueError: bad batch')\n"
        "time.sleep(600)\n"
    )

    async def work() -> None:
        async with place.agent() as (store, _):
            spec = JobSpec(
                "gang", (str(script),), Launcher.DDP, resources=Resources(min_nodes=2, max_nodes=2)
            )
            job: Job = (await store.jobs.submit(spec, "ann", "k")).job
            job = await until(store, job, is_final)
            assert (job.state, job.exit_code) == (JobState.FAILED, 1)
            (attempt,) = await store.jobs.attempts(job.id)
            assert f"rank 1 on {attempt.placement.nodes[1]} " in job.reason  # which one that is depends on the load
            assert attempt.failure is not None
            assert attempt.failure.last_lines == ("about to fail", "ValueError: bad batch")
            assert not place.processes()

    in_loop(work())


def test_nothing_stays_on_a_node_when_a_job_is_over(place: EngineRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, _):
            jobs = [(await store.jobs.submit(command("true"), "ann", f"k{number}")).job for number in range(4)]
            for job in jobs:
                await until(store, job, is_final)
            gone = lambda: not place.run_folders("n1") and not place.run_folders("n2")  # noqa: E731
            await asyncio.to_thread(wait_until, gone, 20, "the run folders to go")

    in_loop(work())
