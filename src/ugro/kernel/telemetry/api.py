"""The API's routes for monitoring: metrics of nodes and jobs, alerts, the stream of changes, Prometheus."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.features.experiments.rules.table import metric_order
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.quantities import is_number
from ugro.kernel.telemetry.curves import MOST_BINS, Curve, Wanted
from ugro.kernel.telemetry.metricstore import job_owner
from ugro.kernel.telemetry.model import is_internal, main_loss
from ugro.kernel.telemetry.prometheus_text import CONTENT_TYPE

_MOST_JOBS = 2000
_MOST_EVENTS = 10_000
_STEP = 1 << 53
Column = Literal["steps", "times", "lows", "highs", "means", "counts", "odd"]
_REALS = frozenset({"lows", "highs", "means"})
Bins = Annotated[int, Query(ge=1, le=MOST_BINS)]
Step = Annotated[int | None, Query(gt=-_STEP, lt=_STEP)]
Keys = Annotated[list[str], Query(alias="key")]
Jobs = Annotated[list[str], Query(alias="job", min_length=1, max_length=_MOST_JOBS)]


class TestBody(Body):
    __test__ = False  # not a pytest class

    channels: list[Annotated[str, Field(max_length=64)]] = Field(default_factory=list, max_length=100)


def add_watch_routes(app: FastAPI, agent: Agent) -> None:
    _add_curve_routes(app, agent)
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

    @app.get("/v1/changes")
    async def changes(after: Annotated[int | None, Query(ge=0, lt=_STEP)] = None) -> Response:
        """Events after that number, or from now on, and changed reports of nodes, until the client leaves."""
        return LiveResponse(ndjson(monitoring.changes(after)), "application/x-ndjson")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await monitoring.parts.prometheus.text(), headers={"Content-Type": CONTENT_TYPE})


def _add_curve_routes(app: FastAPI, agent: Agent) -> None:
    monitoring = agent.monitoring

    async def numbers(words: list[str]) -> tuple[int, ...]:
        found = [int(word) if is_number(word) else (await agent.jobs.find(word)).id for word in words]
        known = await agent.jobs.known(found)
        if missing := [job for job in found if job not in known]:
            raise NotFound(f"there is no job {missing[0]}", hint="see: ugro status")
        return tuple(found)

    @app.get("/v1/nodes/{name:path}/history")
    async def node_history(
        name: str,
        keys: Keys = [],  # noqa: B006  # FastAPI copies it for each request
        first: Step = None,  # unix seconds; default: a day ago
        last: Step = None,
        bins: Bins = 300,
    ) -> Response:
        """Its metrics; ``first`` and ``last`` are times, in seconds since the epoch."""
        agent.cluster.inventory.named(name)
        wanted = Wanted((), tuple(keys), first_step=first, last_step=last, bins=bins)
        return json_response({"curves": await monitoring.node_curves(name, wanted)})

    @app.get("/v1/metrics/keys")
    async def job_keys(jobs: Jobs) -> Response:
        """``keys``: all; ``names``: those to choose from, in order; ``loss``: the one to show first."""
        keys = await monitoring.job_keys(await numbers(jobs))
        names = {one.key for one in keys if not is_internal(one.key)}
        loss = main_loss(names)
        in_order = sorted(names, key=lambda name: (name != loss, metric_order(name)))
        return json_response({"keys": keys, "names": in_order, "loss": loss})

    @app.get("/v1/metrics")
    async def job_curves(wanted: Annotated[CurveQuery, Query()]) -> Response:
        """Metrics of jobs in at most ``bins`` bins; ``column`` and ``digits`` make a smaller answer."""
        owners = tuple(job_owner(job) for job in await numbers(list(wanted.job)))
        curves = await monitoring.metrics.curves(wanted.of(owners))
        return json_response({"curves": curves if wanted.is_plain else [wanted.shortened(one) for one in curves]})


class CurveQuery(Body):
    job: Annotated[tuple[str, ...], Field(min_length=1, max_length=_MOST_JOBS)]
    key: tuple[str, ...] = ()
    attempt: Annotated[int, Field(ge=0, lt=_STEP)] | None = None
    rank: Annotated[int, Field(ge=0, lt=_STEP)] | None = None
    first: Annotated[int, Field(gt=-_STEP, lt=_STEP)] | None = None
    last: Annotated[int, Field(gt=-_STEP, lt=_STEP)] | None = None
    bins: Annotated[int, Field(ge=1, le=MOST_BINS)] = 300
    # A thousand curves are megabytes, and a chart of that many draws only their means.
    column: tuple[Column, ...] = ()  # none: all
    digits: Annotated[int, Field(ge=1, le=17)] | None = None

    @property
    def is_plain(self) -> bool:
        return not self.column and self.digits is None

    def shortened(self, curve: Curve) -> dict[str, Any]:
        columns = {name: getattr(curve, name) for name in self.column or get_args(Column)}
        if self.digits is not None:
            style = f".{self.digits}g"
            for name in _REALS & columns.keys():
                columns[name] = [None if value is None else float(format(value, style)) for value in columns[name]]
        about = {name: getattr(curve, name) for name in ("owner", "attempt", "rank", "key", "count", "width")}
        return about | columns

    def of(self, owners: tuple[str, ...]) -> Wanted:
        return Wanted(owners, self.key, self.attempt, self.rank, self.first, self.last, self.bins)
