"""What is installed on a node is asked for once at a time, however many jobs want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.engine import in_loop, seen_soon
from tests.rig.lying import LIAR, LyingRig
from ugro.features.environments.service.installed import Environments


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LyingRig]:
    rig = LyingRig(tmp_path)
    yield rig
    rig.end()


def test_many_jobs_that_fail_at_once_have_the_packages_listed_once(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, _):
            await seen_soon(lambda: place.watch.machine(LIAR), "the node")
            environments = Environments(store.environments, place.watch)

            async def all_of(count: int, *, is_fresh: bool) -> int:
                """How often the node was asked."""
                before = place.calls().count("check environment")
                found = await asyncio.gather(*(environments.now([LIAR], is_fresh=is_fresh) for _ in range(count)))
                assert len({one[LIAR].fingerprint for one in found}) == 1
                return place.calls().count("check environment") - before

            assert await all_of(80, is_fresh=False) == 1
            assert await all_of(80, is_fresh=False) == 0  # some minutes old is good enough
            # Asked for now: those who came while it was being asked share the next answer.
            assert await all_of(80, is_fresh=True) <= 2

    in_loop(work())
