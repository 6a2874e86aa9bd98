"""The description of the API, as a route of its own."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from ugro.agent.api.openapi import described
from ugro.agent.api.responses import json_response


def add_identity_routes(app: FastAPI) -> None:
    @app.get("/v1/openapi.json")
    async def openapi() -> Response:
        """This description."""
        return json_response(await asyncio.to_thread(described, app))
