"""A job that may be restarted elsewhere: not before its old node must have ended it, whoever cannot be asked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proof.faults import root_of
from tests.proof.faults.lease import leased_supervisors
from tests.rig import agent as rig
from tests.rig import netns
from tests.rig.engine import EngineRig, until
from tests.rig.judge import Book, Entry, Ledger, Task, judge, orphans
from tests.rig.netns import NetnsFarm
from tests.rig.waiting import signal_all, wait_until
from ugro import Client
from ugro.kernel.jobs.model import Cause, Disconnect, Ending, JobSpec, JobState, OnLost, Stop
from ugro.kernel.jobs.operations import CancelJob

# Longer than the silence by which a node counts as unreachable: who takes that for death restarts too soon.
_LEASE_S = 6.0
TASK = Task("leased", lines=100_000, pause_s=0.05)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path, 2)
    yield made
    made.end()


@pytest.mark.proof
def test_no_second_attempt_begins_while_the_first_may_live(place: EngineRig, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    argv = ledger.fields(TASK)["command"]
    assert isinstance(argv, list)
    spec = JobSpec(
        "leased", tuple(argv), env=tuple(ledger.env.items()), stop=Stop(grace_s=0.5),
        disconnect=Disconnect(lost_after_s=_LEASE_S, on_lost=OnLost.RESTART),
    )  # fmt: skip

    async def work() -> None:
        async with place.agent() as (store, engine):
            job = (await store.jobs.submit(spec, "ann", "k")).job
            job = await until(store, job, lambda seen: seen.state is JobState.RUNNING)
            assert job.placement is not None
            place.cut(job.placement.nodes[0])
            await until(store, job, lambda seen: seen.state is JobState.RECOVERING)
            assert ledger.alive() == [], "its devices were given back while it ran"
            again = await until(store, job, lambda seen: seen.attempt == 2 and seen.state is JobState.RUNNING)
            assert again.placement is not None
            assert again.placement.nodes != job.placement.nodes
            assert not place.processes(attempt=1), "the first attempt still runs"
            (first, _) = await store.jobs.attempts(job.id)
            assert first.failure is not None
            assert first.failure.cause is Cause.NODE_LOST
            await asyncio.to_thread(wait_until, lambda: len(ledger.entries()) == 2, 20, "the second to have begun")
            await expect_first_cleared(place, job.placement.nodes[0])
            assert (await store.jobs.get(job.id)).attempt == 2
            await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
            engine.wake()
            assert (await until(store, job, lambda seen: seen.is_final)).state is JobState.CANCELLED

    asyncio.run(work())
    begun = [(entry.attempt, entry.event) for entry in ledger.entries()]
    assert begun == [(1, "begin"), (2, "begin")], ledger.path.read_text()


@pytest.mark.proof
def test_a_stopped_supervisor_on_a_node_that_is_cut_off_does_not_run_beside_the_second_attempt(tmp_path: Path) -> None:
    if reason := netns.available():
        pytest.skip(reason)
    task = Task("leased", lines=100_000, pause_s=0.05, hides_child=True)
    ledger, home = Ledger(tmp_path), tmp_path / "u"
    home.mkdir()
    fields = {**ledger.fields(task), "lost_after": f"{_LEASE_S}s", "on_lost": "restart"}
    with NetnsFarm(tmp_path / "f", 2) as farm, Client(home=home, cluster=farm.cluster_yaml()) as client:
        try:
            job = client.jobs.submit(fields=fields, env={}, key="k")
            wait_until(lambda: len(ledger.alive()) == 2, 60, "the rank and its hidden child")
            first = client.jobs.get(job.id)
            assert first.placement is not None
            node = next(node for node in farm.nodes if node.name == first.placement.nodes[0])
            node.cut()
            signal_all(signal.SIGSTOP, leased_supervisors(root_of(node)))
            [again] = wait_until(lambda: _begun(ledger, 2), 90, "the second attempt to begin")
            assert [entry for entry in ledger.alive() if entry.attempt == 1] == []
            assert again.word != node.name
            verdict = judge(Book(), ledger, {}, home)
            assert (verdict.overlapping, verdict.doubled) == ([], [])
            client.ask(CancelJob(str(job.id)))
            node.heal()
            wait_until(lambda: client.jobs.get(job.id).is_final, 60, "the job to end")
            wait_until(lambda: not orphans(ledger, map(root_of, farm.nodes)), 30, "nothing to be left")
        finally:
            rig.end_agent(home)
            ledger.end_all()


def _begun(ledger: Ledger, attempt: int) -> list[Entry]:
    return [entry for entry in ledger.entries() if (entry.event, entry.attempt) == ("begin", attempt)]


async def expect_first_cleared(place: EngineRig, node: str) -> None:
    """It is back, and nothing of what ran there stays."""
    assert place.run_folders(node)
    place.heal(node)
    await asyncio.to_thread(wait_until, lambda: not place.run_folders(node), 20, "what is left of the first to go")
