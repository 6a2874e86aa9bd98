"""``/jobs``: queued, running and ended jobs; ``/jobs/{id}``: everything about one, its reason first."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from ugro.agent.api.responses import Body
from ugro.agent.support import caller
from ugro.config.job.export import job_file
from ugro.core.errors import NotFound
from ugro.core.job import FINAL_STATES, HOLDING_STATES, WAITING_STATES, Job, JobState
from ugro.store.listing import Listed
from ugro.web.pages.log import add_log_pages
from ugro.web.pages.outputs import add_output_pages
from ugro.web.site import Site
from ugro.web.views import job_page

_PAGE = 50
_MOST_ACTIVE = 50  # of the queued and of the running jobs; the filter shows all


class JobsQuery(Body):
    q: Annotated[str, Query(max_length=200)] = ""
    state: Annotated[JobState | None, Query()] = None
    before: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None
    after: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None

    @property
    def is_plain(self) -> bool:
        return not self.q and self.state is None

    @property
    def is_first(self) -> bool:
        return self.before is None and self.after is None

    def link(self, **cursor: int) -> str:
        given = {"q": self.q, "state": self.state or ""}
        return "/jobs?" + urlencode({**{key: value for key, value in given.items() if value}, **cursor})


def add_job_pages(app: FastAPI, site: Site) -> None:
    add_log_pages(app, site)
    add_output_pages(app, site)
    _add_lists(app, site)
    _add_fragments(app, site)

    @app.get("/jobs/{word}")
    async def job(request: Request, word: str) -> Response:
        view = await job_page.load(site.agent, word)
        if word != str(view.job.id):
            return RedirectResponse(f"/jobs/{view.job.id}", 307)
        cli = f"ugro why {view.job.id}" if not view.job.is_final else f"ugro status {view.job.id}"
        shown: dict[str, Any] = {"view": view, "job": view.job, "headline": view.headline, "job_page": job_page}
        return await site.render(request, "job.html", cli=cli, **shown)

    @app.get("/jobs/{word}/job.yaml")
    async def file(word: str) -> Response:
        found = await site.agent.jobs.find(word)
        name = {"content-disposition": 'attachment; filename="job.yaml"'}
        return Response(job_file(caller.shown(found).spec), media_type="application/yaml", headers=name)


def _add_lists(app: FastAPI, site: Site) -> None:
    @app.get("/jobs")
    async def jobs(request: Request, wanted: Annotated[JobsQuery, Query()]) -> Response:
        cli = f"ugro status --state {wanted.state}" if wanted.state else "ugro status"
        lists = await _lists(site, wanted)
        return await site.render(request, "jobs.html", cli=cli, wanted=wanted, job_page=job_page, **lists)


async def _lists(site: Site, wanted: JobsQuery) -> dict[str, Any]:
    listing = site.agent.store.listing
    counts = await listing.counts()
    waiting = running = list[Job]()
    if wanted.is_plain and wanted.is_first:
        oldest = Listed(states=tuple(WAITING_STATES), after=0, limit=_MOST_ACTIVE, viewer=caller.viewer())
        waiting = (await site.agent.jobs.with_reasons(await listing.page(oldest)))[::-1]
        holding = Listed(states=tuple(HOLDING_STATES), limit=_MOST_ACTIVE, viewer=caller.viewer())
        running = await listing.page(holding)
    states = tuple(FINAL_STATES) if wanted.is_plain else (wanted.state,) if wanted.state else ()
    chosen = Listed(states, wanted.q, wanted.before, wanted.after, _PAGE + 1, caller.viewer())
    some = await listing.page(chosen)
    is_more = len(some) > _PAGE
    some = some[1:] if is_more and wanted.after is not None else some[:_PAGE]
    return {
        "counts": {state: counts.get(state, 0) for state in JobState},
        "waiting": waiting,
        "running": running,
        "headlines": await site.agent.monitoring.headlines.words(running),
        "found": await site.agent.jobs.with_reasons(some),
        "older": wanted.link(before=some[-1].id) if some and (is_more or wanted.after is not None) else None,
        "newer": wanted.link(after=some[0].id) if some and not wanted.is_first and (is_more or wanted.before) else None,
    }


def _add_fragments(app: FastAPI, site: Site) -> None:
    """Parts that take a while to compute. The page fetches them after it has loaded."""
    agent = site.agent

    @app.get("/jobs/{number}/balance")
    async def balance(request: Request, number: int) -> Response:
        job = await agent.store.jobs.get(number)
        try:
            profile, problem = await agent.profiling.of(job), None
        except NotFound as error:
            profile, problem = None, error
        found: dict[str, Any] = {"job": job, "profile": profile, "problem": problem, "job_page": job_page}
        return await site.render(request, "job_balance.html", **found)
