"""The API's routes for training profiles."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.features.training.service import MOST_STEPS, Launch, Profiling
from ugro.kernel.jobs.service import JobService
from ugro.kernel.operations.responses import Body, json_response, large_json_response
from ugro.node.runs.api import MOST_TRACED


class TraceBody(Body):
    key: str = Field(min_length=1, max_length=64)
    steps: int = Field(ge=1, le=MOST_TRACED)


def add_profile_routes(app: FastAPI, jobs: JobService, profiling: Profiling) -> None:
    @app.get("/v1/jobs/{word}/profile")
    async def of(
        word: str,
        attempt: Annotated[int | None, Query(ge=1)] = None,
        steps: Annotated[int | None, Query(ge=1, le=MOST_STEPS)] = None,
    ) -> Response:
        job = await jobs.find(word)
        return json_response({"job": job, "profile": await profiling.of(job, attempt, steps)})

    @app.get("/v1/jobs/{word}/steps")
    async def steps(word: str) -> Response:
        job = await jobs.find(word)
        return await large_json_response({"job": job, "attempts": await profiling.steps(job)})

    @app.post("/v1/jobs/{word}/trace")
    async def trace(word: str, body: TraceBody) -> Response:
        return json_response(await profiling.trace(await jobs.find(word), body.steps, body.key))

    @app.get("/v1/jobs/{word}/traces")
    async def traces(word: str, attempt: Annotated[int | None, Query(ge=1)] = None) -> Response:
        job = await jobs.find(word)
        return json_response({"job": job, "traces": await profiling.traces(job, attempt)})

    @app.get("/v1/advice")
    async def advice(
        name: str,
        before: int | None = None,
        node: Annotated[list[str], Query()] = [],  # noqa: B006  # FastAPI copies it for each request
        least: Annotated[int, Query(ge=1)] = 1,
        most: Annotated[int, Query(ge=1)] = 1,
    ) -> Response:
        note = await jobs.import_note(before) if before is not None else None
        return json_response({"note": note or await profiling.advice(Launch(name, tuple(node), least, most, before))})
