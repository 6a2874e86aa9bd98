"""The agent's loop stands still: what runs on the nodes with a lease goes on, and not for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rig.engine import EngineRig, gated, in_loop, is_final, leased, running, soon, submitted
from tests.rig.waiting import wait_until
from ugro.kernel.agent.loop_watch import LoopWatch
from ugro.kernel.jobs.model import JobState
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import SshOptions
from ugro.node import wire

LEASE_S = 4.0
PATIENCE_S = 60


@pytest.mark.parametrize("leases", [2, pytest.param(10, marks=pytest.mark.proof)])
def test_leases_are_renewed_while_the_loop_stands(tmp_path: Path, leases: int) -> None:
    """Ten leases: for longer than a node program lives that hears nothing of its agent."""
    rig, gate = EngineRig(tmp_path, 1), tmp_path / "gate"

    async def work() -> None:
        async with rig.agent() as (store, engine):
            watch = LoopWatch()
            watch.start(engine.speak)
            script = f"{gated(gate)}; echo done"
            job, node = await running(store, await submitted(store, engine, leased(LEASE_S, "sh", "-c", script)))
            link = rig.cluster.inventory.get(node).link if rig.cluster else None
            begun_s = rig.lease_from_s(node)
            # Nothing is awaited here: nobody else runs in this loop.
            wait_until(lambda: rig.lease_from_s(node) > begun_s + leases * LEASE_S, PATIENCE_S, "renewals without it")
            wait_until(lambda: watch.last, PATIENCE_S, "somebody to notice")
            gate.touch()
            job = await soon(store, job, is_final)
            assert job.state is JobState.SUCCEEDED, job.reason
            assert job.attempt == 1
            assert rig.cluster is not None
            assert rig.cluster.inventory.get(node).link is link, "the connection lives on"
            assert watch.last is not None
            assert "test_standing_loop.py" in watch.last.where
            watch.stop()

    in_loop(work())


@pytest.mark.proof
def test_an_agent_that_stands_for_too_long_is_no_agent(tmp_path: Path) -> None:
    rig, gate = EngineRig(tmp_path, 1), tmp_path / "gate"

    async def work() -> None:
        async with rig.agent() as (store, engine):
            watch = LoopWatch(speaks_for_s=2.0)
            watch.start(engine.speak)
            job, _ = await running(store, await submitted(store, engine, leased(LEASE_S, "sh", "-c", gated(gate))))
            wait_until(lambda: not rig.processes(), PATIENCE_S, "the node to end it by itself")
            await soon(store, job, lambda seen: seen.attempt == 2 or seen.is_final)
            watch.stop()
            gate.touch()

    in_loop(work())


def test_nothing_is_said_in_the_middle_of_a_message(tmp_path: Path) -> None:
    async def work() -> None:
        link = await Link.open(
            NodeSpec("n1", transport="local", remote_root=str(tmp_path)),
            SshOptions(),
            timeout_s=60,
            env=dict(os.environ),
        )
        assert link.speak()
        for _ in range(200):  # the loop sends the rest when it goes on
            link.send(wire.INPUT, 1, b"x" * wire.CHUNK)
        assert not link.speak()
        assert (await link.call("probe", {"gpu_timeout_s": 5}, timeout_s=60)) is not None
        assert link.speak()
        assert (await link.call("probe", {"gpu_timeout_s": 5}, timeout_s=60)) is not None
        link.close()
        assert not link.speak()
        await link.wait_closed()

    in_loop(work())
