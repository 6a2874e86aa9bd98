"""Notes and tags on disk, and which experiments changed since one looked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.features.experiments.model import MAX_TAGS, MAX_TEXT, Note, checked_tags, checked_text
from ugro.kernel.jobs.model import JobSpec, JobState
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import UgroError, UsageError


def test_two_who_add_a_tag_at_once_both_have_it(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = (await store.jobs.submit(JobSpec("train", ("true",)), "ann", "key")).job
        assert await store.notes.get(job.id) == Note(job.id)

        def adding(tag: str) -> Callable[[Note], Note]:
            return lambda note: replace(note, tags=(*note.tags, tag))

        await asyncio.gather(*(store.notes.change(job.id, adding(tag)) for tag in ("a", "b", "c")))
        found = await store.notes.get(job.id)
        assert sorted(found.tags) == ["a", "b", "c"]
        assert found.changed_at is not None

    in_store(tmp_path, work)


def test_a_note_of_no_job_is_refused_and_one_that_changes_nothing_is_no_event(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        with pytest.raises(UgroError):
            await store.notes.change(99, lambda note: replace(note, text="x"))
        job = (await store.jobs.submit(JobSpec("train", ("true",)), "ann", "key")).job
        for text in ("good", "good"):
            await store.notes.change(job.id, lambda note, text=text: replace(note, text=text))  # type: ignore[misc]
        kinds = [event.kind for event in await store.jobs.events(job=job.id)]
        assert kinds == ["queued", "note"]

    in_store(tmp_path, work)


def test_only_jobs_that_changed_since_are_told_and_of_all_only_the_newest(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        jobs = [(await store.jobs.submit(JobSpec("train", ("true",)), "ann", str(n))).job for n in range(5)]
        first = await store.notes.changed(0, 3)
        assert [job.id for job in first.jobs] == [job.id for job in jobs[2:]]
        assert (await store.notes.changed(first.seq, 3)).jobs == ()
        await store.jobs.move(jobs[4], JobState.CANCELLED, "enough")
        await store.jobs.move(jobs[0], JobState.CANCELLED, "too old to matter")
        await store.notes.change(jobs[3].id, lambda note: replace(note, tags=("x",)))
        second = await store.notes.changed(first.seq, 3)
        assert sorted(job.id for job in second.jobs) == [jobs[3].id, jobs[4].id]
        assert [(note.job, note.tags) for note in second.notes] == [(jobs[3].id, ("x",))]

    in_store(tmp_path, work)


@pytest.mark.parametrize("tags", [["a b"], [""], ["x" * 65], ["<b>"], ["a,b"], [str(n) for n in range(MAX_TAGS + 1)]])
def test_what_is_no_tag_is_refused(tags: list[str]) -> None:
    with pytest.raises(UsageError):
        checked_tags(tags)


def test_tags_are_kept_once_each_and_notes_have_an_end() -> None:
    assert checked_tags(["b", "a", "b", "größe", "v1.2:x/y"]) == ("b", "a", "größe", "v1.2:x/y")
    assert checked_text("  good \n") == "good"
    with pytest.raises(UsageError):
        checked_text("x" * (MAX_TEXT + 1))
