"""The API's routes for job results."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.agent.api.responses import Body, json_response
from ugro.agent.jobs.results import MOST_LISTED, ResultService
from ugro.agent.jobs.service import JobService
from ugro.agent.support.caller import shown

_MOST_COMPARED = 20
Attempt = Annotated[int | None, Query(ge=1)]


class FetchBody(Body):
    patterns: list[str] = Field(default_factory=list, max_length=1000)
    attempt: int | None = Field(default=None, ge=1)


def add_result_routes(app: FastAPI, jobs: JobService, results: ResultService) -> None:
    @app.get("/v1/jobs/{word}/results")
    async def of(word: str, attempt: Attempt = None, all_files: bool = False) -> Response:
        """Of the newest attempt or another, with the names of 1,000 files or of all."""
        job = await jobs.find(word)
        found = await results.of(job, attempt, most_listed=None if all_files else MOST_LISTED)
        return json_response({"job": job, "results": found})

    @app.get("/v1/jobs/{word}/results/brief")
    async def brief(word: str) -> Response:
        """How many files are here and on the nodes, without their names."""
        return json_response({"results": await results.brief(await jobs.find(word))})

    @app.post("/v1/jobs/{word}/results/fetch")
    async def fetch(word: str, body: FetchBody) -> Response:
        """Begins; how far it is, and what failed, is in the results."""
        job = await jobs.find(word)
        await results.fetch(job, body.patterns, body.attempt)
        return json_response({"job": job, "results": await results.of(job, body.attempt)})

    @app.get("/v1/compare")
    async def compare(job: Annotated[list[str], Query(min_length=2, max_length=_MOST_COMPARED)]) -> Response:
        found = await jobs.find_different(job)
        return json_response({"jobs": found, "rows": await results.compare([shown(job) for job in found])})

    @app.delete("/v1/jobs/{word}/results")
    async def remove(word: str) -> Response:
        """Here and on the nodes; logs stay. ``problems``: what failed."""
        jobs.expect_removable()
        job = await jobs.find(word)
        problems = await results.remove(job)
        return json_response({"job": await jobs.find(str(job.id)), "problems": problems})
