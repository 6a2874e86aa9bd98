"""The route that tells what users and groups have used."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.features.quotas.service import UsageService
from ugro.kernel.operations.responses import json_response

_LATEST_S = 4e9  # a time of this century


def add_usage_routes(app: FastAPI, usage: UsageService) -> None:
    @app.get("/v1/usage")
    async def report(
        since: Annotated[float, Query(ge=0, le=_LATEST_S)] = 0,  # seconds since the epoch
        user: Annotated[str | None, Query(max_length=255)] = None,
    ) -> Response:
        """What users and groups used since a time, and how much of their quotas."""
        return json_response({"usage": await usage.report(since, user)})
