"""The API's routes for sweeps."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ugro.features.sweeps.service.creation import SweepRequest
from ugro.features.sweeps.service.service import SweepService
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.operations.responses import json_response, while_connected


def add_sweep_routes(app: FastAPI, sweeps: SweepService) -> None:
    @app.post("/v1/sweeps")
    async def create(request: Request, body: SweepRequest) -> Response:
        """``{"sweep"}``, or ``{"needs"}``: the variables whose values the client must send."""

        async def answer() -> Response:
            found = await sweeps.create(body)
            return json_response({"needs": found.variables} if isinstance(found, Needs) else {"sweep": found})

        return await while_connected(request, answer())

    @app.post("/v1/sweeps/plan")
    async def plan(request: Request, body: SweepRequest) -> Response:
        """``{"plan"}``, or ``{"needs"}``."""

        async def answer() -> Response:
            found = await sweeps.plan(body)
            return json_response({"needs": found.variables} if isinstance(found, Needs) else {"plan": found})

        return await while_connected(request, answer())
