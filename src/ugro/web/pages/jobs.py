"""``/jobs``: queued, running and ended jobs; ``/jobs/{id}``: everything about one, its reason first."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

from ugro.kernel.access import caller
from ugro.kernel.jobs.config.file import job_file
from ugro.kernel.jobs.config.options import OPTIONS, form_values
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, WAITING_STATES, Job, JobState
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.jobs.service import Change
from ugro.kernel.operations.app import http_status
from ugro.kernel.operations.responses import Body, json_response
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.kernel.support.secrets import is_secret
from ugro.web.access import may_launch
from ugro.web.pages import job_page
from ugro.web.pages.log import add_log_pages
from ugro.web.pages.outputs import add_output_pages
from ugro.web.site import Site, own_user

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
            profile, problem = await agent.parts.profiling.of(job), None
        except NotFound as error:
            profile, problem = None, error
        found: dict[str, Any] = {"job": job, "profile": profile, "problem": problem, "job_page": job_page}
        return await site.render(request, "job_balance.html", **found)


# --- launch -----------------------------------------------------------------------------------------------------------
# ``/jobs/{id}/again``: a job as a form and a job file, to launch it again with changes and the same code.
#
# The only way to submit a job from a browser. Access control has checked the request's origin before it comes here.


_LONGEST_TEXT = 256 * 1024


class AgainBody(Body):
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,64}$")]  # of the page
    text: Annotated[str, Field(max_length=_LONGEST_TEXT)]
    fields: Annotated[dict[str, Annotated[str, Field(max_length=_LONGEST_TEXT)]], Field(max_length=20)]


def add_launch_pages(app: FastAPI, site: Site) -> None:
    agent = site.agent

    @app.get("/jobs/{number}/again")
    async def form(request: Request, number: int) -> Response:
        _expect_allowed(site)
        job = await agent.jobs.editable(number)
        return await site.render(
            request,
            "job_again.html",
            job=job,
            text=job_file(job.spec),
            values=form_values(job.spec),
            options=OPTIONS,
            kept=[name for name, value in job.spec.env if is_secret(name, value)],
            key=secrets.token_urlsafe(24),
        )

    @app.post("/jobs/{number}/again")
    async def launch(number: int, body: AgainBody) -> Response:
        try:
            _expect_allowed(site)
            change = Change(body.text, body.fields)
            job = await agent.jobs.launch_again(number, change, own_user(agent), submit_key(number, body.key, change))
        except UgroError as error:
            return Response(dumps({"error": error.to_wire()}), http_status(error), media_type="application/json")
        return json_response({"id": job.id})


def submit_key(number: int, page: str, change: Change) -> str:
    """The same content, sent twice from one page, is one job; after an edit it is another."""
    fields: Mapping[str, str] = dict(sorted(change.fields.items()))
    digest = hashlib.sha256(dumps([change.text, fields]).encode()).hexdigest()
    return f"again-{number}-{page}-{digest[:32]}"


def _expect_allowed(site: Site) -> None:
    if not may_launch(site.agent.cluster.config.dashboard):
        hint = "set dashboard.launch to true in the cluster file, or use: ugro clone JOB > job.yaml"
        raise NotAllowed("this dashboard does not launch jobs", hint=hint)
