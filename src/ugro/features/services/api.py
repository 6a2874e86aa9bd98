"""The API's routes for services."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from pydantic import Field

from ugro.features.services.model import ServiceReport
from ugro.features.services.service.creation import ServiceRequest
from ugro.features.services.service.service import Services
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson, while_connected

_LONGEST_LABEL = 100


class UpdateBody(Body):
    request: ServiceRequest
    canary: Annotated[float | None, Field(gt=0, lt=1)] = None


class ScaleBody(Body):
    replicas: int


class DecideBody(Body):
    promotes: bool


class KeyBody(Body):
    label: Annotated[str, Field(max_length=_LONGEST_LABEL)] = ""


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

    _add_looks(app, services)
    _add_changes(app, services)
    _add_keys(app, services)


def _add_looks(app: FastAPI, services: Services) -> None:
    @app.get("/v1/services")
    async def listed(everything: Annotated[bool, Query(alias="all")] = False) -> Response:
        """With ``all``, those that have ended, too."""
        return json_response({"services": await services.listed(everything=everything)})

    @app.get("/v1/services/{name}")
    async def report(name: str) -> Response:
        return json_response({"service": await services.report(name)})

    @app.get("/v1/services/{name}/watch")
    async def watch(name: str) -> Response:
        """The service now and after each change, until it is over."""
        await services.report(name)  # an unknown name is an error before the stream begins
        return LiveResponse(ndjson(services.watch_one(name)), "application/x-ndjson")


def _add_changes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/services/{name}/scale")
    async def scale(name: str, body: ScaleBody) -> Response:
        return json_response({"service": await services.scale(name, body.replicas)})

    @app.post("/v1/services/{name}/decide")
    async def decide(name: str, body: DecideBody) -> Response:
        return json_response({"service": await services.decide(name, promotes=body.promotes)})

    @app.delete("/v1/services/{name}")
    async def stop(name: str) -> Response:
        return json_response({"service": await services.stop(name)})


def _add_keys(app: FastAPI, services: Services) -> None:
    @app.get("/v1/services/{name}/keys")
    async def keys(name: str) -> Response:
        return json_response({"keys": await services.keys(name)})

    @app.post("/v1/services/{name}/keys")
    async def create_key(name: str, body: KeyBody) -> Response:
        """With the key itself, this once."""
        made, secret = await services.create_key(name, body.label)
        return json_response({"key": made, "secret": secret})

    @app.delete("/v1/services/{name}/keys/{key}")
    async def revoke_key(name: str, key: str) -> Response:
        await services.revoke_key(name, key)
        return json_response({})


def _answer(found: ServiceReport | Needs) -> Response:
    return json_response({"needs": found.variables} if isinstance(found, Needs) else {"service": found})
