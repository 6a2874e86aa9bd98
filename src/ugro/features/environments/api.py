"""The API's routes for Python environments: make one ahead of time, list, show and remove them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.features.environments.service.setup import NodeSetup
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.links.node import Node
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson

Names = Annotated[list[str], Query(alias="node")]


class SetupBody(Body):
    nodes: list[str] = Field(default_factory=list)
    file: Path | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
    here: Path = Path("/")
    env: dict[str, str] | None = None  # None: the client has not been asked for variables yet

    def submit(self) -> Submit:
        return Submit("", "", self.file, self.fields, self.here, self.env, as_options=True)


class GcBody(Body):
    nodes: list[str] = Field(default_factory=list)
    unused_s: Annotated[float, Field(ge=0, lt=1e10)] | None = None
    everything: bool = False


async def _needs(lacking: Needs) -> AsyncGenerator[list[dict[str, Any]]]:
    yield [{"needs": lacking.variables}]


def add_environment_routes(app: FastAPI, agent: Agent) -> None:
    def select(names: list[str]) -> list[Node]:
        return agent.cluster.inventory.select(names)

    @app.post("/v1/setup")
    async def setup(body: SetupBody) -> Response:
        """``{"step"}`` for a node again and again, then ``{"setup"}``; or ``{"needs"}``: variables that it lacks."""
        # A mistake in names or in the file is an error before the stream begins.
        nodes = select(body.nodes)
        request = await agent.jobs.environment(body.submit())
        if isinstance(request, Needs):
            return LiveResponse(ndjson(_needs(request)), "application/x-ndjson")
        steps = NodeSetup(agent.cluster, agent.health, agent.python_envs).run(nodes, request)
        return LiveResponse(ndjson(steps), "application/x-ndjson")

    @app.get("/v1/environments")
    async def environments(names: Names = []) -> Response:  # noqa: B006  # FastAPI copies it for each request
        return json_response(await agent.kept_environments.listing(select(names)))

    @app.post("/v1/environments/gc")
    async def gc(body: GcBody) -> Response:
        tidy = agent.kept_environments.gc
        return json_response({"nodes": await tidy(select(body.nodes), body.unused_s, everything=body.everything)})

    @app.get("/v1/environments/{word}")
    async def environment(word: str) -> Response:
        return json_response({"environment": await agent.kept_environments.find(word)})

    @app.delete("/v1/environments/{word}")
    async def remove(word: str, names: Names = []) -> Response:  # noqa: B006  # as above
        return json_response({"nodes": await agent.kept_environments.remove(word, select(names))})
