"""A node that reports what was never placed on it: it changes no other job, is reported once, and costs no memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.engine import command, gated, in_loop, is_final, running, seen_soon, soon, submitted
from tests.rig.liar import forged
from tests.rig.lying import HONEST, LIAR, LyingRig
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.store.database import Store

_TERABYTE = 1 << 40


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LyingRig]:
    rig = LyingRig(tmp_path)
    yield rig
    rig.end()


async def done_on(place: LyingRig, store: Store, engine: Engine, node: str, *argv: str, key: str) -> Job:
    """A job that ran on that node, while the other one takes no work."""
    other = HONEST if node == LIAR else LIAR
    await store.drain(other, "test")
    job = await soon(store, await submitted(store, engine, command(*argv), key), is_final)
    await store.resume(other)
    assert job.placement is not None
    assert job.placement.nodes == (node,)
    return job


async def reported(place: LyingRig, store: Store) -> str:
    await seen_soon(lambda: place.watch.strange(LIAR), "the lie to be noticed")
    [event] = [event for event in await store.jobs.events() if event.kind == "node"]
    assert event.node == LIAR
    return event.text


def test_a_node_changes_nothing_of_jobs_that_were_placed_elsewhere(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            # More than is sent with the exit of a run: so it has a file that a forged one could change.
            text = "seq 5000; echo result > $UGRO_OUTPUT/result.txt"
            job = await done_on(place, store, engine, HONEST, "sh", "-c", text, key="a")
            await seen_soon(lambda: not place.run_folders(HONEST), "all of it to be collected")
            before = place.files(job.id)
            assert b"result\n" in before.values()
            other_attempt, not_yet = forged(job.id, 2), forged(job.id + 2)
            odd_names = [forged(name) for name in (f"0{job.id}", "²", "9" * 40, "x" * 5000, "../../1")]
            huge = [forged(job.id, attempt) for attempt in (0, 10**30, 1.5)]
            place.tell(runs=[forged(job.id), other_attempt, not_yet, *odd_names, *huge])
            text = await reported(place, store)
            assert text.startswith("reports runs that were never placed there: ")
            assert f"attempt 1 of job {job.id} was placed on n1" in text
            assert text.endswith("they are ignored")
            honest = await done_on(place, store, engine, LIAR, "echo", "still here", key="b")
            assert (honest.state, await place.log(honest)) == (JobState.SUCCEEDED, "still here\n")
            assert place.files(job.id) == before
            assert place.asked() == []
            await reported(place, store)  # once, also after all that

    in_loop(work())


@pytest.mark.proof
def test_a_node_with_very_many_forged_runs_takes_no_memory(place: LyingRig) -> None:
    count = 100_000

    async def work() -> None:
        async with place.agent() as (store, engine):
            first = await done_on(place, store, engine, LIAR, "true", key="a")
            await seen_soon(lambda: not place.run_folders(LIAR), "all of it to be collected")
            before = resident_bytes()
            place.tell(count=count)
            await asyncio.to_thread(
                wait_until, lambda: (found := place.watch.strange(LIAR)) and found.count == count, 120, "all of them"
            )
            assert resident_bytes() - before < 10 << 20
            job = await done_on(place, store, engine, LIAR, "true", key="b")
            assert (first.state, job.state) == (JobState.SUCCEEDED,) * 2
            place.lies.unlink()
            await asyncio.to_thread(wait_until, lambda: place.watch.strange(LIAR) is None, 120, "all of them to go")

    in_loop(work())


@pytest.mark.proof
def test_a_log_is_not_larger_than_its_rank_can_have_written(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            place.tell(offset=_TERABYTE)
            await store.drain(HONEST, "test")
            gate = place.folder / "gate"
            job = await submitted(store, engine, command("sh", "-c", f"echo begun; {gated(gate)}"))
            job, _ = await running(store, job)
            log = place.folder / "jobs" / str(job.id) / "attempt_1" / "logs" / "rank_0.log"
            await seen_soon(log.exists, "its log to be followed")
            gate.touch()
            assert (await soon(store, job, is_final)).state is JobState.SUCCEEDED
            assert log.stat().st_size < 100

    in_loop(work())


@pytest.mark.proof
def test_the_run_of_a_job_that_was_removed_is_removed_there_and_nothing_is_fetched(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await done_on(place, store, engine, HONEST, "true", key="a")
            await seen_soon(lambda: not place.run_folders(HONEST), "all of it to be collected")
            await store.retention.remove([job.id], "now", lambda jobs: "removed")
            place.tell(runs=[forged(job.id)])
            await seen_soon(lambda: any(line.startswith("runs.remove") for line in place.asked()), "its removal")
            assert {line.split()[0] for line in place.asked()} == {"runs.remove"}
            assert not (place.folder / "jobs" / str(job.id)).exists()

    in_loop(work())


@pytest.mark.proof
def test_what_a_node_says_of_ranks_that_it_was_not_given_is_left_out(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            await store.drain(HONEST, "test")
            gate = place.folder / "gate"
            job, _ = await running(store, await submitted(store, engine, command("sh", "-c", gated(gate))))
            ranks = {"ranks": [{"rank": rank} for rank in range(300)]}
            place.tell(runs=[forged(job.id, status="running", exit=None, state=ranks, has_outputs=False)])
            await seen_soon(lambda: place.watch.strange(LIAR), "the lie to be noticed")
            status = place.watch.status(LIAR, job.id, 1)
            assert status is not None
            assert status.known_ranks == (0,)
            place.lies.unlink()
            gate.touch()
            assert (await soon(store, job, is_final)).state is JobState.SUCCEEDED
            logs = place.folder / "jobs" / str(job.id) / "attempt_1" / "logs"
            assert {path.stem for path in logs.glob("*")} <= {"rank_0"}

    in_loop(work())


@pytest.mark.proof
def test_an_answer_about_another_run_than_was_asked_for_is_not_taken(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            await store.drain(HONEST, "test")
            gate = place.folder / "gate"
            first, _ = await running(store, await submitted(store, engine, command("sh", "-c", gated(gate)), "a"))
            place.tell(replies={"runs.start": {"results": [{"run": forged(first.id, has_outputs=False)}]}})
            await seen_soon(place.is_heard, "the lie to be known")
            await soon(store, await submitted(store, engine, command("true"), "b"), is_final)
            status = place.watch.status(LIAR, first.id, 1)
            assert status is not None
            assert not status.has_ended
            gate.touch()
            assert (await soon(store, first, is_final)).state is JobState.SUCCEEDED

    in_loop(work())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
