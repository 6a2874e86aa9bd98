"""Jobs on disk: legal moves only, devices held once, submits once, older attempts without a say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.stores import sql, store_at
from ugro.kernel.jobs.model import (
    FINAL_STATES,
    MOVES,
    Ending,
    IllegalMove,
    Job,
    JobSpec,
    JobState,
    Placement,
    Resources,
    Share,
    Sharing,
    check_move,
)
from ugro.kernel.jobs.moves import About, StaleMove
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError

GPU = Placement((Share("gpu1", gpus=(0,)),))


def in_store(file: Path, work: Callable[[JobStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = store_at(file)
        await store.open()
        try:
            await work(store.jobs)
        finally:
            await store.close()

    asyncio.run(run())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def spec(name: str = "train") -> JobSpec:
    return JobSpec(name, ("true",), env=(("A", "ü"),))


def test_a_gpu_is_held_by_one_job_or_by_jobs_of_one_group(file: Path) -> None:
    """Whatever a scheduler decides: the database lets nobody else in."""

    async def work(jobs: JobStore) -> None:
        async def start(name: str, group: str = "") -> Job:
            sharing = Sharing(group, 2) if group else None
            wanted = replace(spec(name), resources=Resources(gpus_per_node=1, sharing=sharing))
            job = (await jobs.submit(wanted, "ann", name)).job
            return await jobs.start(job, Placement((Share("gpu1", gpus=(1,), gpu_group=group),)), "")

        first = await start("a", "sweep-1")
        await start("b", "sweep-1")
        for name, group in (("c", "sweep-1"), ("d", "sweep-2"), ("e", ""), ("f", "sweep-10")):
            with pytest.raises(StaleMove, match="GPU 1 of gpu1 is held by others"):
                await start(name, group)
        assert first.state is JobState.STARTING

    in_store(file, work)


def test_the_same_submit_made_twice_is_one_job(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        first = await jobs.submit(spec(), "ann", "key")
        second = await jobs.submit(spec("other"), "ann", "key")
        assert (first.is_new, second.is_new) == (True, False)
        assert second.job == first.job
        assert second.job.spec == spec()

    in_store(file, work)


def test_what_was_withdrawn_before_it_was_recorded_is_refused_and_nothing_else(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        assert await jobs.withdraw("key") is None
        with pytest.raises(NotAllowed, match="withdrawn"):
            await jobs.submit(spec(), "ann", "key")
        with pytest.raises(NotAllowed, match="withdrawn"):
            await jobs.submit_many([(spec(), "ann", "other", About()), (spec(), "ann", "key", About())])
        assert await jobs.newest(10) == []
        recorded = (await jobs.submit(spec(), "ann", "other")).job
        assert await jobs.withdraw("other") == recorded, "too late: it continues"
        assert not (await jobs.submit(spec(), "ann", "other")).is_new

    in_store(file, work)


def test_a_device_is_never_given_twice_and_is_free_again_when_its_job_has_ended(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        one = (await jobs.submit(spec(), "ann", "1")).job
        two = (await jobs.submit(spec(), "ann", "2")).job
        one = await jobs.start(one, GPU, "free")
        with pytest.raises(UgroError) as caught:
            await jobs.start(two, GPU, "free")
        assert type(caught.value.__cause__).__name__ in ("IntegrityError", "UniqueViolation")
        assert (await jobs.get(two.id)).state is JobState.QUEUED
        one = await jobs.move(one, JobState.STOPPING, "over", ending=Ending.DONE)
        await jobs.move(one, JobState.SUCCEEDED, "done", exit_code=0)
        assert (await jobs.start(two, GPU, "free")).attempt == 1

    in_store(file, work)


def test_what_was_decided_on_an_older_state_or_attempt_changes_nothing(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        queued = (await jobs.submit(spec(), "ann", "1")).job
        starting = await jobs.start(queued, GPU, "free")
        with pytest.raises(StaleMove):
            await jobs.move(queued, JobState.CANCELLED, "late")
        stopping = await jobs.move(starting, JobState.STOPPING, "a rank died", ending=Ending.FAILED)
        recovering = await jobs.move(stopping, JobState.RECOVERING, "again", ending=None)
        again = await jobs.start(recovering, GPU, "free")
        with pytest.raises(StaleMove):
            await jobs.move(starting, JobState.RUNNING, "said by attempt 1")
        assert (again.attempt, (await jobs.get(queued.id)).state) == (2, JobState.STARTING)

    in_store(file, work)


def test_a_users_cancel_goes_before_a_failure_but_not_before_success(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        job = (await jobs.submit(spec(), "ann", "1")).job
        await jobs.ask_to_end(job.id, Ending.PREEMPTED)
        assert (await jobs.ask_to_end(job.id, Ending.CANCELLED)).ending is Ending.CANCELLED
        assert (await jobs.ask_to_end(job.id, Ending.TIME_LIMIT)).ending is Ending.CANCELLED
        with pytest.raises(StaleMove):
            await jobs.start(job, GPU, "free")
        done = (await jobs.submit(spec(), "ann", "2")).job
        done = await jobs.start(done, GPU, "free")
        done = await jobs.move(done, JobState.STOPPING, "over", ending=Ending.DONE)
        assert (await jobs.ask_to_end(done.id, Ending.CANCELLED)).ending is Ending.DONE

    in_store(file, work)


def test_jobs_are_found_by_id_by_name_and_as_the_last(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        ids = [(await jobs.submit(spec(name), "ann", name + str(i))).job.id for i, name in enumerate("aab")]
        assert (await jobs.find("a")).id == ids[1]
        assert (await jobs.find(str(ids[0]))).id == ids[0]
        assert (await jobs.find("last")).id == ids[2]
        for word in ("nobody", "³", "9" * 30, "9" * 5000):
            with pytest.raises(NotFound):
                await jobs.find(word)

    in_store(file, work)


def test_everything_that_happened_is_there_once_and_in_order(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        job = (await jobs.submit(spec(), "ann", "1")).job
        job = await jobs.start(job, GPU, "free now: gpu1")
        await jobs.move(job, JobState.RUNNING, "every rank runs")
        events = await jobs.events(job=job.id)
        assert [event.kind for event in events] == ["queued", "starting", "running"]
        assert [event.attempt for event in events] == [0, 1, 1]
        assert await jobs.events(after=events[1].seq) == events[2:]

    in_store(file, work)


def test_only_the_tables_moves_are_legal_and_final_states_stay() -> None:
    for old in JobState:
        for new in JobState:
            if new in MOVES[old]:
                check_move(old, new)
            else:
                with pytest.raises(IllegalMove):
                    check_move(old, new)
    assert all(not MOVES[state] for state in FINAL_STATES)


def test_what_was_placed_where_is_known_for_every_attempt_and_how_far_numbers_go(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        assert (await jobs.recorded([(1, 1)])).newest_job == 0
        submitted = (await jobs.submit(spec(), "ann", "key")).job
        started = await jobs.start(submitted, GPU, "it fits")
        found = await jobs.recorded([(1, 1), (1, 2), (2, 1)])
        assert found.newest_job == 1
        assert {key: run.placement for key, run in found.runs.items()} == {(1, 1): started.placement, (1, 2): None}
        assert found.runs[1, 1].spec == spec()

    in_store(file, work)


def test_a_job_that_cannot_be_read_is_not_one_that_was_removed(file: Path) -> None:
    async def work(jobs: JobStore) -> None:
        await jobs.start((await jobs.submit(spec(), "ann", "key")).job, GPU, "it fits")
        sql(file, "UPDATE jobs SET spec = '{}'")
        assert (await jobs.recorded([(1, 1)])).runs[1, 1].placement is None

    in_store(file, work)
