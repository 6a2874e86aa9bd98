"""What ``ugro node bench`` found decides, in an agent on real nodes: the shares of a batch, and the node of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.rig.identity import person, running_agent
from ugro.features.hardware.model import CpuFigures, Measurement, Mode, NodeFigures
from ugro.kernel.access.model import Role
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import JobSpec, Launcher, Resources
from ugro.kernel.jobs.records import DryRun
from ugro.kernel.links.model import Choice
from ugro.kernel.links.operations import ChooseBestNode

WHEN = "2026-01-01T00:00:00+00:00"
ONE = JobSpec("train", ("train.py",), Launcher.DDP, balance="static")
BOTH = replace(ONE, resources=Resources(min_nodes=2, max_nodes=2))
# What the machine does meanwhile must not matter: load costs nothing.
CLUSTER = """\
nodes:
  n1: {{transport: local, remote_root: {folder}/n1}}
  n2: {{transport: local, remote_root: {folder}/n2}}
health_check: {{cpu_weight: 0}}
"""


@asynccontextmanager
async def agent_in(folder: Path) -> AsyncIterator[Agent]:
    """Two nodes that are equal as far as anybody sees: both are this machine."""
    async with running_agent(folder, CLUSTER.format(folder=folder)) as (agent, _):
        yield agent


async def measured(agent: Agent) -> None:
    """The second node is four times as fast as the first."""
    rates = {"n1": 1e8, "n2": 4e8}
    nodes = tuple(NodeFigures(name, WHEN, Mode.FULL, cpu=CpuFigures(2e7, rate, 8)) for name, rate in rates.items())
    await agent.measured.record(Measurement(WHEN, Mode.FULL, 60.0, nodes))


async def best(agent: Agent) -> Choice:
    found: Choice = await agent.health.choose(ChooseBestNode(), person("ann", Role.ADMIN))
    return found


def shares(planned: DryRun) -> tuple[dict[str, float], str]:
    """The speed of each node's rank, and where that comes from."""
    assert planned.plan is not None, planned.reason
    env = dict(planned.plan.nodes[0].ranks[0].env)
    speeds = [float(word) for word in env["UGRO_SPEEDS"].split(",")]
    return dict(zip([node.node for node in planned.plan.nodes], speeds, strict=True)), env["UGRO_SPEEDS_SOURCE"]


def test_static_shares_are_by_the_figures_that_the_agent_keeps(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_in(tmp_path) as agent:
            before, source = shares(await agent.jobs.preview(BOTH, "ann"))
            assert before == {"n1": 1.0, "n2": 1.0}
            assert "cores" in source
            await measured(agent)
            after, source = shares(await agent.jobs.preview(BOTH, "ann"))
            assert after == {"n1": 0.25, "n2": 1.0}
            assert source == "measured by ugro node bench (compression)"

    asyncio.run(scenario())


def test_of_equal_nodes_the_one_that_was_measured_to_be_faster_gets_the_job(tmp_path: Path) -> None:
    async def chosen(agent: Agent) -> tuple[str, tuple[str, ...]]:
        placement = (await agent.jobs.preview(ONE, "ann")).placement
        assert placement is not None
        return (await best(agent)).name, placement.nodes

    async def scenario() -> None:
        async with agent_in(tmp_path) as agent:
            assert await chosen(agent) == ("n1", ("n1",))
            await measured(agent)
            assert await chosen(agent) == ("n2", ("n2",))
            assert (await best(agent)).reason.endswith("about the same as n1, and was measured to be faster")

    asyncio.run(scenario())
