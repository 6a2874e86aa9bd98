"""``/``: the cluster; ``/nodes/{name}``: one node, with curves of the last day."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from ugro.agent.agent import Agent
from ugro.agent.support.caller import disguised, viewer, visible
from ugro.core.env_report import SHORT
from ugro.core.job import Job
from ugro.web.site import Site
from ugro.web.views import hardware, nodes
from ugro.web.views.activity import activity
from ugro.web.views.gpus import gpu_grid
from ugro.web.views.nodes import NodesQuery, node_table
from ugro.web.views.overview import NodeRow, Overview, chosen, totals

_MOST_WAITING = 12
_MOST_RUNNING = 30
_MOST_HAPPENED = 2000  # events that are folded into lines
_MOST_ALERTS = 12
HOURS = (1, 6, 24)


def add_cluster_pages(app: FastAPI, site: Site) -> None:
    overview = Overview(site.agent)

    @app.get("/")
    async def cluster(request: Request, wanted: Annotated[NodesQuery, Query()]) -> Response:
        rows, limits = await overview.rows(), site.agent.cluster.config.alerts
        monitoring = site.agent.monitoring
        live = monitoring.parts.engine.live
        held = disguised(live.holding())
        waiting, running, alerts = visible(live.waiting()), visible(held), monitoring.monitor.alerts()
        newest = sorted(running, key=lambda job: -job.id)[:_MOST_RUNNING]
        return await site.render(
            request,
            "cluster.html",
            cli="ugro health",
            nodes=node_table(rows, wanted),
            totals=totals(rows),
            wanted=wanted,
            node_view=nodes,
            waiting=await site.agent.jobs.with_reasons(waiting[:_MOST_WAITING]),
            waiting_count=len(waiting),
            running=newest,
            headlines=await monitoring.headlines.words(newest),
            job_names={job.id: job.spec.name for job in held},
            running_count=len(running),
            alerts=alerts[:_MOST_ALERTS],
            alert_count=len(alerts),
            activity=activity(await site.agent.store.listing.newest_happened(_MOST_HAPPENED, viewer())),
            grid=gpu_grid(chosen(rows, wanted.q, wanted.status), held, limits),
            limits=limits,
        )

    @app.get("/nodes/{name}")
    async def node(request: Request, name: str, hours: Annotated[int, Query(ge=1, le=24)] = 1) -> Response:
        site.agent.cluster.inventory.named(name)
        row = next(row for row in await overview.rows() if row.name == name)
        monitor = site.agent.monitoring.monitor
        return await site.render(
            request,
            "node.html",
            cli=f"ugro node show {name}",
            row=row,
            watched=next(one for one in monitor.watched() if one.name == name),
            alerts=[alert for alert in monitor.alerts() if alert.node == name],
            jobs=_jobs_on(site.agent, row),
            spec=site.agent.cluster.inventory.named(name).spec,
            environments=await site.agent.kept_environments.seen(site.agent.cluster.inventory.named(name)),
            short=SHORT,
            hours=hours,
            all_hours=HOURS,
            **await _measured(site.agent, name),
        )


async def _measured(agent: Agent, name: str) -> dict[str, Any]:
    store, figures = agent.store.hardware, agent.measured.latest_of(name)
    columns, runs = hardware.runs(await store.history(name))
    return {
        "measured": figures,
        "measured_bars": hardware.own_bars(figures, await store.best(name)) if figures else [],
        "measured_columns": columns,
        "measured_runs": runs,
        "worse": agent.measured.findings(name),
    }


def _jobs_on(agent: Agent, row: NodeRow) -> list[Job]:
    return [job for job in visible(agent.monitoring.parts.engine.live.holding()) if job.id in row.jobs]
