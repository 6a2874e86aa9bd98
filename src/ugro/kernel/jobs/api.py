"""The API's route that compares jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from ugro.kernel.access.caller import shown
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.service import JobService
from ugro.kernel.operations.responses import json_response

_MOST_COMPARED = 20


def add_compare_routes(app: FastAPI, jobs: JobService, results: ResultService) -> None:
    @app.get("/v1/compare")
    async def compare(job: Annotated[list[str], Query(min_length=2, max_length=_MOST_COMPARED)]) -> Response:
        found = await jobs.find_different(job)
        return json_response({"jobs": found, "rows": await results.compare([shown(job) for job in found])})
