"""The API's routes for monitoring: metrics of nodes and jobs, alerts, the stream of changes, Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.operations.responses import Body, json_response
from ugro.kernel.telemetry.prometheus_text import CONTENT_TYPE

_MOST_EVENTS = 10_000
_MOST_HEADLINES = 50


class TestBody(Body):
    __test__ = False  # not a pytest class

    channels: list[Annotated[str, Field(max_length=64)]] = Field(default_factory=list, max_length=100)


def add_watch_routes(app: FastAPI, agent: Agent) -> None:
    _add_headline_routes(app, agent)
    monitoring = agent.monitoring

    @app.get("/v1/alerts")
    async def alerts(limit: Annotated[int, Query(ge=0, le=_MOST_EVENTS)] = 100) -> Response:
        """``alerts``: the active ones; ``events``: the history of alerts, the newest first."""
        history = await agent.store.alerts.history(limit)
        return json_response({"alerts": monitoring.monitor.alerts(), "events": history})

    @app.post("/v1/alerts/test")
    async def test(body: TestBody) -> Response:
        return json_response({"channels": await monitoring.test(body.channels)})

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
