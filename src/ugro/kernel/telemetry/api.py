"""The API's routes for monitoring: metrics of nodes and jobs, alerts, the stream of changes, Prometheus."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.operations.responses import json_response
from ugro.kernel.telemetry.prometheus_text import CONTENT_TYPE

_MOST_HEADLINES = 50


def add_watch_routes(app: FastAPI, agent: Agent) -> None:
    _add_headline_routes(app, agent)
    monitoring = agent.monitoring

    @app.get("/v1/nodes")
    async def nodes() -> Response:
        """The newest reports, without asking any node, and how often each is probed."""
        monitor = monitoring.monitor
        return json_response({"nodes": list(monitor.reports.values()), "watched": monitor.watched()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await monitoring.parts.prometheus.text(), headers={"Content-Type": CONTENT_TYPE})


def _add_headline_routes(app: FastAPI, agent: Agent) -> None:
    headlines = agent.monitoring.headlines

    @app.get("/v1/jobs/{word}/headline")
    async def headline(word: str) -> Response:
        return json_response({"headline": await headlines.of(await agent.jobs.find(word))})

    @app.get("/v1/jobs/{word}/energy")
    async def energy(word: str) -> Response:
        """Null if nothing was measured."""
        return json_response({"energy": await agent.monitoring.energy.of(await agent.jobs.find(word))})

    @app.get("/v1/headlines")
    async def of_running() -> Response:
        """Of the newest running jobs."""
        listed = Listed(states=(JobState.RUNNING,), limit=_MOST_HEADLINES)
        return json_response({"headlines": [await headlines.of(job) for job in await agent.jobs.page(listed)]})
