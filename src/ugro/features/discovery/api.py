"""Routes about machines that were found."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.features.discovery.service import Discovery
from ugro.kernel.operations.responses import LiveResponse, json_response, ndjson

Names = Annotated[list[str], Query(alias="node")]


def add_discovery_routes(app: FastAPI, discovery: Discovery) -> None:
    @app.get("/v1/discovery")
    async def look() -> Response:
        return json_response(await discovery.look())

    @app.get("/v1/discovery/reports")
    async def reports(names: Names = []) -> Response:  # noqa: B006  # FastAPI copies it for each request
        return LiveResponse(ndjson(discovery.reports(names)), "application/x-ndjson")
