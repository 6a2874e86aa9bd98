"""The API's routes for measured hardware."""

from __future__ import annotations

from fastapi import FastAPI, Response
from pydantic import Field

from ugro.features.hardware.model import Mode, Part
from ugro.features.hardware.service import Wish
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson


class BenchBody(Body):
    nodes: list[str] = Field(default_factory=list)
    mode: Mode = Mode.FULL
    parts: list[Part] = Field(default_factory=lambda: list(Part))
    force: bool = False


def add_hardware_routes(app: FastAPI, agent: Agent) -> None:
    store = agent.store.hardware

    @app.post("/v1/bench")
    async def bench(body: BenchBody) -> Response:
        nodes = agent.cluster.inventory.select(body.nodes)
        wish = Wish(body.mode, frozenset(body.parts), body.force)
        return LiveResponse(ndjson(agent.hardware.measure(nodes, wish)), "application/x-ndjson")

    @app.get("/v1/hardware")
    async def hardware() -> Response:
        """The newest figures of all nodes, links and all-reduces."""
        members = {node.spec.name for node in agent.cluster.inventory}
        return json_response(
            {
                "nodes": [figures for name, figures in agent.measured.latest.items() if name in members],
                "links": await store.links(members),
                "allreduces": [one for one in await store.allreduces() if set(one.nodes) <= members],
            }
        )

    @app.get("/v1/nodes/{name:path}/hardware")
    async def node_hardware(name: str) -> Response:
        agent.cluster.inventory.named(name)
        return json_response(
            {
                "figures": agent.measured.latest_of(name),
                "history": await store.history(name),
                "best": await store.best(name),
                "links": [one for one in await store.links() if one.source == name],
                "allreduces": [one for one in await store.allreduces() if name in one.nodes],
                "findings": agent.measured.findings(name),
            }
        )
