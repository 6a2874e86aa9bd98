"""The API's routes for monitoring: metrics of nodes and jobs, alerts, the stream of changes, Prometheus."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.responses import json_response
from ugro.kernel.telemetry.prometheus_text import CONTENT_TYPE


def add_watch_routes(app: FastAPI, agent: Agent) -> None:
    monitoring = agent.monitoring

    @app.get("/v1/nodes")
    async def nodes() -> Response:
        """The newest reports, without asking any node, and how often each is probed."""
        monitor = monitoring.monitor
        return json_response({"nodes": list(monitor.reports.values()), "watched": monitor.watched()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await monitoring.parts.prometheus.text(), headers={"Content-Type": CONTENT_TYPE})


