"""``/experiments``: a table of runs; ``/compare``: some of them side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, Field

from ugro.features.experiments import pages_data as comparison
from ugro.features.experiments import pages_data as experiment_table
from ugro.features.experiments.pages_data import TableQuery
from ugro.features.experiments.rules.table import Spread
from ugro.features.experiments.service import Experiments
from ugro.kernel.access.caller import shown
from ugro.kernel.files.code.diff import CodeDiff
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import NotFound
from ugro.kernel.telemetry.model import Experiment
from ugro.web.site import Site


class CompareQuery(BaseModel):
    """The query of /compare. The browser adds its own parameters for the display of curves."""

    jobs: Annotated[list[str], Field(max_length=2000)] = Field(default_factory=list)
    q: Annotated[str, Field(max_length=2000)] = ""  # a filter, instead of job numbers
    all: bool = False


def add_pages(app: FastAPI, site: Site) -> None:
    experiments = Experiments(site.agent.store, site.agent.monitoring)
    _add_table(app, site, experiments)
    _add_compare(app, site, experiments)

    @app.get("/compare/code")
    async def code(request: Request, old: int, new: int) -> Response:
        """The differences between the code of two jobs, file by file."""
        jobs = [await site.agent.jobs.find(str(number)) for number in (old, new)]
        found = await _code(site, jobs)
        cli = f"ugro compare {old} {new}"
        return await site.render(request, "compare_code.html", cli=cli, old=jobs[0], new=jobs[1], diff=found)


def _add_table(app: FastAPI, site: Site, experiments: Experiments) -> None:
    @app.get("/experiments")
    async def table(request: Request, wanted: Annotated[TableQuery, Query()]) -> Response:
        now = time.time()
        # Sorting thousands of rows would block the event loop.
        shown = await asyncio.to_thread(experiment_table.table, wanted, await experiments.all(), now)
        return await site.render(
            request,
            "experiments.html",
            cli="ugro status --limit 100",
            wanted=wanted,
            table=shown,
            view=experiment_table,
            is_spread=lambda value: isinstance(value, Spread),
        )


def _add_compare(app: FastAPI, site: Site, experiments: Experiments) -> None:
    @app.get("/compare")
    async def compare(request: Request, wanted: Annotated[CompareQuery, Query()]) -> Response:
        if len(wanted.jobs) > 1:  # as a form sends them; redirected so that each page has one address
            return RedirectResponse(_link(",".join(wanted.jobs)), 303)
        everything = await experiments.all()
        numbers = comparison.chosen(wanted.jobs)
        if wanted.q and not numbers:
            numbers = await asyncio.to_thread(experiment_table.comparable, wanted.q, everything, time.time())
        runs = _found(numbers, everything)
        are_few = len(runs) <= comparison.MOST_SIDE_BY_SIDE
        jobs = [await site.agent.store.jobs.get(one.id) for one in runs] if are_few else []
        rows = await site.agent.results.compare([shown(job) for job in jobs]) if len(jobs) > 1 else ()
        return await site.render(
            request,
            "compare.html",
            cli="ugro compare " + (" ".join(str(one.id) for one in runs) if are_few and runs else "JOB JOB…"),
            runs=runs,
            few=comparison.MOST_SIDE_BY_SIDE,
            newest=[one for one in reversed(everything) if one.figures][:10] if not runs else [],
            document=await asyncio.to_thread(comparison.runs_document, runs),
            sections=comparison.sections(rows, is_all=wanted.all),
            varied=await asyncio.to_thread(comparison.varied, runs) if not are_few else [],
            is_all=wanted.all,
            code=_differing_code(jobs),
            link=partial(_link, ",".join(map(str, numbers))),
        )


def _found(numbers: Sequence[int], everything: Sequence[Experiment]) -> list[Experiment]:
    known = {one.id: one for one in everything}
    if missing := [number for number in numbers if number not in known]:
        raise NotFound(f"there is no job {missing[0]}", hint="see: ugro status")
    return [known[number] for number in numbers]


def _differing_code(jobs: Sequence[Job]) -> tuple[int, int] | None:
    """The first job with code, and the first whose code differs from it."""
    kept = [job for job in jobs if job.spec.snapshot is not None]
    other = next((job for job in kept if job.spec.snapshot != kept[0].spec.snapshot), None) if kept else None
    return None if other is None else (kept[0].id, other.id)


async def _code(site: Site, jobs: Sequence[Job]) -> CodeDiff:
    for job in jobs:
        if job.spec.snapshot is None:
            raise NotFound(f"job {job.id} has no stored code", hint="see: ugro compare")
    old, new = (job.spec.snapshot or "" for job in jobs)
    return await site.agent.code.difference(old, new)


def _link(numbers: str, **changes: str) -> str:
    query = {"jobs": numbers} | changes
    return "/compare?" + urlencode({key: value for key, value in query.items() if value}, safe=",")
