"""Lists of jobs leave large specs where they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.rig.stores import store_at
from ugro.kernel.jobs.model import After, JobSpec, Resources
from ugro.kernel.jobs.moves import About
from ugro.kernel.jobs.rows import Listed

LARGE = JobSpec(
    "large",
    ("python3", "-c", "x" * 100_000, *["y"] * 1000),
    env=(("A", "z" * 100_000),),
    setup="#" * 50_000,
    resources=Resources(gpus_per_node=2),
    priority=90,
)


def test_a_list_has_the_beginning_of_a_large_command_and_the_job_itself_has_all(tmp_path: Path) -> None:
    small = replace(LARGE, name="small", argv=("true", "x" * 1000), env=(("A", "1"),), setup="true")

    async def work() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            first = (await store.jobs.submit(small, "ann", "1", About())).job
            spec = replace(LARGE, after=After(ok=(first.id,)))
            large = (await store.jobs.submit(spec, "ann", "2", About())).job
            assert large.spec == (await store.jobs.get(large.id)).spec == spec
            listed = await store.listing.page(Listed())
            assert [job.id for job in listed] == [large.id, first.id]
            assert listed[1].spec == small
            brief = listed[0].spec
            assert (*brief.argv[:2], brief.argv[2][:10], brief.argv[-1]) == ("python3", "-c", "x" * 10, "…")
            assert sum(map(len, brief.argv)) < 2000
            assert brief == replace(spec, argv=brief.argv, env=(), setup=None), "what is small is all there"
            [live] = [job for job in await store.jobs.in_states({large.state}) if job.id == large.id]
            assert live.spec == spec, "what decides has all of it"
        finally:
            await store.close()

    asyncio.run(work())
