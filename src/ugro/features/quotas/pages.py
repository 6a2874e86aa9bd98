"""The page about what users and groups have used, and the same as CSV."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from ugro.kernel.jobs.records import UsageReport, UsageRow
from ugro.web.site import Site

DAYS = (1, 7, 30, 365)
_HOURS = 24 * 3600
Days = Annotated[int, Query(ge=1, le=3650)]


def add_pages(app: FastAPI, site: Site) -> None:
    async def report(days: int) -> UsageReport:
        return await site.agent.usage.report(time.time() - days * _HOURS)

    @app.get("/usage")
    async def usage(request: Request, days: Days = 7) -> Response:
        found = await report(days)
        return await site.render(
            request, "usage.html", report=found, days=days, choices=DAYS, cli=f"ugro usage --since {days}d"
        )

    @app.get("/usage.csv")
    async def as_csv(days: Days = 7) -> Response:
        text = io.StringIO()
        csv.writer(text).writerows(_csv_rows(await report(days)))
        name = f"usage-{days}d.csv"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _csv_rows(report: UsageReport) -> Iterator[list[object]]:
    yield ["kind", "name", "jobs", "gpu_hours", "cpu_hours", "energy_wh", "cost", "currency", "gpus_now", "queued"]
    for kind, rows in (("user", report.users), ("group", report.groups)):
        for row in rows:
            yield [kind, _plain(row), row.jobs, *_figures(row), report.currency or "", f"{row.gpus:g}", row.queued]


def _figures(row: UsageRow) -> list[str]:
    figures = [f"{value:.3f}" for value in (row.gpu_hours, row.cpu_hours, row.energy_wh)]
    return [*figures, "" if row.cost is None else f"{row.cost:.4f}"]


def _plain(row: UsageRow) -> str:
    """A spreadsheet takes a cell that begins so for a formula."""
    return f"'{row.name}" if row.name.startswith(("=", "+", "-", "@")) else row.name
