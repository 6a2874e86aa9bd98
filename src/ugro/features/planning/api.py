"""The API's route for plans before a launch."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ugro.features.planning.service import PlanRequest, PlanService
from ugro.kernel.operations.responses import LiveResponse, ndjson


def add_planning_routes(app: FastAPI, planning: PlanService) -> None:
    @app.post("/v1/plans")
    async def plan(body: PlanRequest) -> Response:
        """Ends its trials if the client leaves."""
        return LiveResponse(ndjson(planning.plan(body)), "application/x-ndjson")
