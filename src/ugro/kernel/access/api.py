"""The route that reads the audit log."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.kernel.access.service import AuditLog
from ugro.kernel.operations.openapi import described
from ugro.kernel.operations.responses import json_response

_MOST = 10_000
_LATEST_S = 4e9  # a time of this century


def add_audit_routes(app: FastAPI, audit: AuditLog) -> None:
    @app.get("/v1/audit")
    async def entries(
        limit: Annotated[int, Query(ge=1, le=_MOST)] = 1000,
        since: Annotated[float, Query(ge=0, le=_LATEST_S)] = 0,  # seconds since the epoch
        user: str | None = None,
    ) -> Response:
        """The newest ones, the oldest of them first."""
        first = datetime.fromtimestamp(since, UTC).isoformat(timespec="milliseconds")
        return json_response({"audit": await audit.newest(limit, first, user)})


# --- identity ---------------------------------------------------------------------------------------------------------
# The description of the API, as a route of its own.


def add_identity_routes(app: FastAPI) -> None:
    @app.get("/v1/openapi.json")
    async def openapi() -> Response:
        """This description."""
        return json_response(await asyncio.to_thread(described, app))
