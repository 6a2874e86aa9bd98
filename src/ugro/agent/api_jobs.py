"""The API's routes for jobs. A route parses, asks, answers; it decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from pydantic import Field

from ugro.agent.jobs import JobService
from ugro.agent.responses import Body, LiveResponse, json_response, ndjson
from ugro.core.job import Job
from ugro.policy.why import Why


class JobBody(Body):
    key: str
    user: str
    file: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


def add_job_routes(app: FastAPI, jobs: JobService) -> None:
    @app.post("/v1/jobs", response_model=Job)
    async def submit(body: JobBody) -> Response:
        file = Path(body.file) if body.file else None
        return json_response(await jobs.submit(file, body.fields, body.env, body.user, body.key))

    @app.get("/v1/jobs")
    async def newest(limit: int = 50) -> Response:
        return json_response({"jobs": await jobs.newest(limit)})

    @app.get("/v1/jobs/{word}", response_model=Job)
    async def find(word: str) -> Response:
        return json_response(await jobs.find(word))

    @app.post("/v1/jobs/{word}/cancel", response_model=Job)
    async def cancel(word: str) -> Response:
        return json_response(await jobs.cancel(word))

    @app.get("/v1/jobs/{word}/why", response_model=Why)
    async def reason(word: str) -> Response:
        return json_response(await jobs.why(word))


def add_job_streams(app: FastAPI, jobs: JobService) -> None:
    @app.get("/v1/jobs/{word}/wait")
    async def wait(word: str) -> Response:
        await jobs.find(word)
        return LiveResponse(ndjson(jobs.wait(word)), "application/x-ndjson")

    @app.get("/v1/jobs/{word}/logs")
    async def logs(word: str, rank: int | None = None, follow: bool = False) -> Response:
        await jobs.find(word)
        return LiveResponse(jobs.logs(word, rank, follow), "application/vnd.ugro.frames")

    @app.get("/v1/events")
    async def events(after: int = 0, job: str | None = None, follow: bool = False) -> Response:
        return LiveResponse(ndjson(jobs.events(after, job, follow)), "application/x-ndjson")
