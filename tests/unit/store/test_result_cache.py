"""The result cache in the store: decided in the transaction that submits, and only for what still holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.kernel.jobs.model import Environment, Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.moves import About, SmallLog
from ugro.kernel.store.database import Store

SPEC = JobSpec("train", ("true",), is_cached=True)
KEYED = About(cache_key="k")


async def done(store: Store, key: str, about: About = KEYED, *, user: str = "ann", node: str = "n1") -> Job:
    job = (await store.jobs.submit(SPEC, user, key, about)).job
    started = await store.jobs.start(job, Placement((Share(node),)), "free")
    return await store.jobs.finish(started, SmallLog(started.id, started.attempt, ()))


def pointing(job: Job) -> About:
    return About(cache_key="k", cached_from=job.id)


def test_a_job_ends_at_once_and_points_to_the_one_that_did_the_same(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        first = await done(store, "a")
        second = (await store.jobs.submit(SPEC, "bob", "b", pointing(first))).job
        assert (second.state, second.cached_from, second.exit_code) == (JobState.SUCCEEDED, first.id, 0)
        assert second.reason == f"cached from job {first.id}"
        assert second.ended_at is not None
        events = [(event.kind, event.text) for event in await store.jobs.events(job=second.id)]
        assert events == [("queued", "submitted by bob"), ("succeeded", second.reason)]
        again = await store.jobs.submit(SPEC, "bob", "b", pointing(first))
        assert (again.is_new, again.job) == (False, second), "asked again, it is the same job"
        found = await store.jobs.done_before("k", "bob")
        assert found is not None
        assert found.id == first.id, "one that was not run stands for nobody"

    in_store(tmp_path, scenario)


@pytest.mark.parametrize("how", ["removed", "other key", "newer"])
def test_what_no_longer_holds_when_it_is_submitted_is_run(tmp_path: Path, how: str) -> None:
    async def scenario(store: Store) -> None:
        first = await done(store, "a", About(cache_key="other") if how == "other key" else KEYED)
        if how == "removed":
            await store.jobs.note_results_removed(first)
            assert await store.jobs.done_before("k", "bob") is None
        if how == "newer":
            await done(store, "c")
        job = (await store.jobs.submit(SPEC, "ann", "b", pointing(first))).job
        assert (job.state, job.cached_from) == (JobState.QUEUED, None)
        texts = [event.text for event in await store.jobs.events(job=job.id)]
        assert f"job {first.id} can no longer be reused; the job is run" in texts

    in_store(tmp_path, scenario)


def test_only_what_has_succeeded_counts(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.jobs.submit(SPEC, "ann", "a", KEYED)
        assert await store.jobs.done_before("k", "bob") is None
        await done(store, "b")
        assert await store.jobs.done_before("k", "bob") is not None
        assert await store.jobs.done_before("other", "bob") is None

    in_store(tmp_path, scenario)


def test_what_ran_in_the_account_of_another_person_does_not_count(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        everybodys = await done(store, "a")
        bobs = await done(store, "b", user="bob", node="bob@n1")
        anns = await done(store, "c", node="ann@n1")
        found = {user: await store.jobs.done_before("k", user) for user in ("ann", "bob", "cat")}
        assert {user: job.id for user, job in found.items() if job} == {
            "ann": anns.id,
            "bob": bobs.id,
            "cat": everybodys.id,
        }
        job = (await store.jobs.submit(SPEC, "bob", "d", pointing(anns))).job
        assert (job.state, job.cached_from) == (JobState.QUEUED, None)

    in_store(tmp_path, scenario)


def test_an_environment_is_kept_once_however_many_attempts_ran_with_it(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        first, second = await done(store, "a"), await done(store, "b")
        old, new = Environment("3.11", "/p", "x"), Environment("3.12", "/p", "x")
        for job in (first, second):
            await store.environments.record(job.id, 1, {"n1": old})
        await store.environments.record(first.id, 1, {"n1": new})
        assert await store.environments.of(first.id, 1) == {"n1": old}, "the first word stands"
        assert await store.environments.of(second.id, 1) == {"n1": old}
        assert await store.environments.of(second.id, 2) == {}

    in_store(tmp_path, scenario)
