"""The API's route for plans before a launch."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ugro.agent.api.responses import LiveResponse, ndjson
from ugro.agent.planning.service import PlanRequest, PlanService


def add_planning_routes(app: FastAPI, planning: PlanService) -> None:
    @app.post("/v1/plans")
    async def plan(body: PlanRequest) -> Response:
        """Ends its trials if the client leaves."""
        return LiveResponse(ndjson(planning.plan(body)), "application/x-ndjson")
