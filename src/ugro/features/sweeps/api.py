"""The API's routes for sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from pydantic import Field

from ugro.features.sweeps.service.creation import SweepRequest
from ugro.features.sweeps.service.service import Extension, SweepService
from ugro.kernel.access.caller import OwnKey, SeenUser
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson, while_connected

_MOST = 1_000_000


class ExtendBody(Body):
    trials: int | None = Field(default=None, ge=1, le=_MOST)
    parallel: int | None = Field(default=None, ge=1, le=_MOST)


class LaunchBody(Body):
    user: SeenUser
    key: OwnKey


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

    _add_looks(app, sweeps)
    _add_changes(app, sweeps)


def _add_looks(app: FastAPI, sweeps: SweepService) -> None:
    @app.get("/v1/sweeps")
    async def newest(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        """The newest first."""
        return json_response({"sweeps": await sweeps.newest(limit)})

    @app.get("/v1/sweeps/{word}")
    async def report(word: str, history: bool = False) -> Response:
        """By number or name; with ``history``, all values of its trials' metric."""
        return json_response({"sweep": await sweeps.report(word, with_history=history)})

    @app.get("/v1/sweeps/{word}/document")
    async def document(word: str) -> Response:
        return json_response({"document": await sweeps.document(word)})

    @app.get("/v1/sweeps/{word}/watch")
    async def watch(word: str) -> Response:
        """The sweep now and after each change, until it is over."""
        await sweeps.report(word)  # an unknown name is an error before the stream begins
        return LiveResponse(ndjson(sweeps.watch(word)), "application/x-ndjson")

    @app.get("/v1/sweeps/{word}/importance")
    async def importance(word: str) -> Response:
        return json_response({"importance": await sweeps.importance(word)})


def _add_changes(app: FastAPI, sweeps: SweepService) -> None:
    @app.post("/v1/sweeps/{word}/stop")
    async def stop(word: str) -> Response:
        return json_response({"sweep": await sweeps.stop(word)})

    @app.post("/v1/sweeps/{word}/resume")
    async def resume(word: str, body: ExtendBody) -> Response:
        return json_response({"sweep": await sweeps.resume(word, Extension(body.trials, body.parallel))})

    @app.post("/v1/sweeps/{word}/launch")
    async def launch(word: str, body: LaunchBody) -> Response:
        return json_response({"job": await sweeps.launch_best(word, body.user, body.key)})
