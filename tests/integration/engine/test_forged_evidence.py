"""A node that shows forged marks and tickets: the agent does not go into safe mode for it. For true ones it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.engine import KEY, command, in_loop, is_final, seen_soon, soon, submitted
from tests.rig.liar import forged
from tests.rig.lying import LIAR, LyingRig
from ugro.features.safe_mode.model import Mark
from ugro.features.safe_mode.records import write_mark
from ugro.kernel.jobs.engine.plan import ticket_of
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import InSafeMode

OTHER_KEY = bytes(reversed(range(32)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LyingRig]:
    rig = LyingRig(tmp_path)
    yield rig
    rig.end()


async def done_on_the_liar(store: Store, engine: Engine, key: str) -> Job:
    await store.drain("n1", "test")
    job = await soon(store, await submitted(store, engine, command("true"), key), is_final)
    await store.resume("n1")
    assert job.state is JobState.SUCCEEDED
    return job


def shown(place: LyingRig, key: bytes, agent: str, newer: Job) -> None:
    """The node reports a run that the state does not know, with a ticket, and a mark of a later generation."""
    held = {"job": str(newer.id), "attempt": newer.attempt, "status": "running", "ticket": ticket_of(key, agent, newer)}
    mark = write_mark(key, Mark(agent, 99, 99_000))
    place.tell(
        runs=[forged(newer.id, newer.attempt, status="running", exit=None)],
        replies={"runs.tickets": {"runs": [held], "started": {}}, "runs.mark": {"mark": mark}},
    )


@pytest.mark.parametrize("is_ours", [False, True])
def test_only_a_ticket_that_we_have_sealed_begins_safe_mode(place: LyingRig, is_ours: bool) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            job = await done_on_the_liar(store, engine, "a")
            newer = replace(job, id=job.id + 50, state=JobState.STARTING)
            shown(place, KEY if is_ours else OTHER_KEY, await store.agent_id(), newer)
            if is_ours:
                await seen_soon(lambda: engine.safe_mode.is_on, "safe mode")
                with pytest.raises(InSafeMode):
                    engine.safe_mode.check("and takes no jobs")
            else:
                await seen_soon(lambda: place.watch.strange(LIAR), "the lie to be noticed")
                await done_on_the_liar(store, engine, "b")
                assert not engine.safe_mode.is_on

    in_loop(work())


@pytest.mark.parametrize("is_ours", [False, True])
def test_only_a_mark_that_we_have_sealed_begins_safe_mode(place: LyingRig, is_ours: bool) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            await done_on_the_liar(store, engine, "a")
            agent = await store.agent_id()
        [folder] = (place.folder / LIAR).glob(f".ugro/agents/{agent}@*")
        (folder / "mark").write_text(write_mark(KEY if is_ours else OTHER_KEY, Mark(agent, 99, 1000)))
        async with place.agent() as (store, engine):
            if is_ours:
                await seen_soon(lambda: engine.safe_mode.is_on, "safe mode")
                found = engine.safe_mode.status()
                assert found is not None
                assert "n2 has met generation 99" in found.reasons[0]
            else:
                await done_on_the_liar(store, engine, "b")
                assert not engine.safe_mode.is_on

    in_loop(work())


def test_a_node_that_claims_a_later_generation_without_proof_is_left_out_alone(place: LyingRig) -> None:
    async def work() -> None:
        async with place.agent() as (store, engine):
            await done_on_the_liar(store, engine, "a")
            agent = await store.agent_id()
        [folder] = (place.folder / LIAR).glob(f".ugro/agents/{agent}@*")
        (folder / "mark").unlink()
        place.set_generation(LIAR, 99)
        async with place.agent() as (store, engine):
            await seen_soon(lambda: place.watch.refusal(LIAR), "the node to refuse")
            job = await soon(store, await submitted(store, engine, command("true"), "b"), is_final)
            assert job.placement is not None
            assert (job.state, job.placement.nodes) == (JobState.SUCCEEDED, ("n1",))
            assert not engine.safe_mode.is_on

    in_loop(work())
