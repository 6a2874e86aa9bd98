"""The API's routes for job results."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.agent.api.responses import json_response
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.service import JobService

_MOST_COMPARED = 20


def add_result_routes(app: FastAPI, jobs: JobService, results: ResultService) -> None:
    @app.get("/v1/jobs/{word}/results")
    async def of(word: str, attempt: Annotated[int | None, Query(ge=1)] = None) -> Response:
        job = await jobs.find(word)
        return json_response({"job": job, "results": await results.of(job, attempt)})

    @app.get("/v1/compare")
    async def compare(job: Annotated[list[str], Query(min_length=2, max_length=_MOST_COMPARED)]) -> Response:
        found = await jobs.find_different(job)
        return json_response({"jobs": found, "rows": await results.compare(found)})

    @app.delete("/v1/jobs/{word}/results")
    async def remove(word: str) -> Response:
        job = await jobs.find(word)
        problems = await results.remove(job)
        return json_response({"job": await jobs.find(str(job.id)), "problems": problems})
