"""The API's routes that create and update services."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import Field

from ugro.features.services.model import ServiceReport
from ugro.features.services.service.creation import ServiceRequest
from ugro.features.services.service.service import Services
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.operations.responses import Body, json_response, while_connected


class UpdateBody(Body):
    request: ServiceRequest
    canary: Annotated[float | None, Field(gt=0, lt=1)] = None


def add_service_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/services")
    async def create(request: Request, body: ServiceRequest) -> Response:
        """``{"service"}``, or ``{"needs"}``: the variables whose values the client must send."""

        async def answer() -> Response:
            return _answer(await services.create(body))

        return await while_connected(request, answer())

    @app.post("/v1/services/{name}/update")
    async def update(request: Request, name: str, body: UpdateBody) -> Response:
        async def answer() -> Response:
            return _answer(await services.update(name, body.request, body.canary))

        return await while_connected(request, answer())


def _answer(found: ServiceReport | Needs) -> Response:
    return json_response({"needs": found.variables} if isinstance(found, Needs) else {"service": found})
