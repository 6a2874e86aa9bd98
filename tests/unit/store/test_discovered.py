"""Nodes that joined by themselves: what is recorded, and whose drain is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.features.discovery.model import Candidate, Member
from ugro.kernel.jobs.model import Ending, JobSpec, JobState, Launcher, Placement, Share
from ugro.kernel.jobs.moves import StaleMove
from ugro.kernel.store.database import Store

GPU1 = Candidate("gpu1", "10.0.0.1", "ann", 2222, ("fast",), ("zookeeper", "mdns"))
ON_GPU1 = Placement((Share("gpu1", gpus=(0,)),))


async def start_job(store: Store) -> None:
    job = (await store.jobs.submit(JobSpec("train", ("true",)), "ann", "key")).job
    await store.jobs.start(job, ON_GPU1, "fits")


def test_a_node_that_joined_is_known_to_the_next_agent(tmp_path: Path) -> None:
    async def first(store: Store) -> None:
        await store.discovered.put(GPU1)
        await store.discovered.put(Candidate("gpu2", "gpu2"))
        await store.discovered.leave("gpu2", "left")

    async def second(store: Store) -> None:
        assert await store.discovered.open() == [Member(GPU1), Member(Candidate("gpu2", "gpu2"), has_left=True)]
        assert await store.drained() == {"gpu2": "left"}

    in_store(tmp_path, first)
    in_store(tmp_path, second)


def test_a_node_is_named_while_checkpoints_of_a_job_that_is_over_may_be_there(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        spec = JobSpec("train", ("train.py",), launcher=Launcher.DDP)
        assert spec.has_checkpoints
        job = await store.jobs.start((await store.jobs.submit(spec, "ann", "key")).job, ON_GPU1, "fits")
        assert await store.discovered.unkept() == set()
        stopping = await store.jobs.move(job, JobState.STOPPING, "done", ending=Ending.DONE)
        over = await store.jobs.move(stopping, JobState.SUCCEEDED, "done", exit_code=0)
        assert (await store.discovered.busy(), await store.discovered.unkept()) == (set(), {"gpu1"})
        await store.jobs.kept(over)
        assert await store.discovered.unkept() == set()

    in_store(tmp_path, work)


def test_a_node_that_left_and_is_back_takes_jobs_again(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        await store.discovered.leave("gpu1", "left")
        await store.discovered.put(GPU1)
        assert await store.drained() == {}
        assert await store.discovered.open() == [Member(GPU1)]

    in_store(tmp_path, work)


@pytest.mark.parametrize("is_before", [True, False])
def test_what_a_person_drained_stays_drained(tmp_path: Path, is_before: bool) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        if is_before:
            await store.drain("gpu1", "new fans")
        await store.discovered.leave("gpu1", "left")
        if not is_before:
            await store.drain("gpu1", "new fans")
        await store.discovered.put(GPU1)
        assert await store.drained() == {"gpu1": "new fans"}
        await store.discovered.hand_over(["gpu1"])
        assert await store.drained() == {"gpu1": "new fans"}
        await store.resume("gpu1")
        assert await store.drained() == {}

    in_store(tmp_path, work)


def test_a_node_with_a_job_is_not_removed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        await start_job(store)
        await store.discovered.leave("gpu1", "left")
        assert await store.discovered.busy() == {"gpu1"}
        assert not await store.discovered.remove("gpu1")
        assert await store.discovered.open() == [Member(GPU1, has_left=True)]

    in_store(tmp_path, work)


def test_a_node_that_was_removed_a_moment_ago_gets_no_job(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        await store.discovered.leave("gpu1", "left")
        assert await store.discovered.remove("gpu1")
        with pytest.raises(StaleMove, match="drained"):
            await start_job(store)
        assert await store.discovered.open() == [], "the next agent has forgotten it, and its drain"
        assert await store.drained() == {}

    in_store(tmp_path, work)


def test_a_node_that_is_back_is_not_removed_by_an_old_decision(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        assert not await store.discovered.remove("gpu1")
        assert await store.discovered.open() == [Member(GPU1)]

    in_store(tmp_path, work)


def test_a_node_that_the_cluster_file_lists_now_is_no_longer_ours(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        await store.discovered.leave("gpu1", "left")
        await store.discovered.hand_over(["gpu1"])
        assert await store.discovered.open() == []
        assert await store.drained() == {}

    in_store(tmp_path, work)


def test_joining_leaving_and_going_are_events_and_a_changed_field_is_none(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        await store.discovered.put(Candidate("gpu1", "10.0.0.2", sources=("mdns",)))
        await store.discovered.leave("gpu1", "no longer listed by mdns")
        await store.discovered.remove("gpu1")
        events = await store.jobs.events()
        assert [(event.node, event.kind, event.text) for event in events] == [
            ("gpu1", "node-joined", "found by zookeeper, mdns"),
            ("gpu1", "node-left", "no longer listed by mdns; it takes no new jobs"),
            ("gpu1", "node-removed", "no job uses it any more"),
        ]

    in_store(tmp_path, work)


def test_a_record_that_cannot_be_read_keeps_the_name_of_the_node(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.discovered.put(GPU1)
        query = "UPDATE discovered_nodes SET candidate = '{}'"
        await store._database.run(lambda db: db.execute(query))
        [member] = await store.discovered.open()
        assert member.name == "gpu1"

    in_store(tmp_path, work)
