"""Routes about machines that were found."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.agent.api.responses import LiveResponse, json_response, ndjson
from ugro.agent.discovery.service import Discovery

Names = Annotated[list[str], Query(alias="node")]


def add_discovery_routes(app: FastAPI, discovery: Discovery) -> None:
    @app.get("/v1/discovery")
    async def look() -> Response:
        return json_response(await discovery.look())

    @app.get("/v1/discovery/reports")
    async def reports(names: Names = []) -> Response:  # noqa: B006  # FastAPI copies it for each request
        return LiveResponse(ndjson(discovery.reports(names)), "application/x-ndjson")
