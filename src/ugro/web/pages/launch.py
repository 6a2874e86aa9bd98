"""``/jobs/{id}/again``: a job as a form and a job file, to launch it again with changes and the same code.

The only way to submit a job from a browser. Access control has checked the request's origin before it comes here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import Field

from ugro.agent.api.app import http_status
from ugro.agent.api.responses import Body, json_response
from ugro.agent.jobs.service import Change
from ugro.config.job.export import job_file
from ugro.config.job.form import form_values
from ugro.config.job.options import OPTIONS
from ugro.core.errors import NotAllowed, UgroError
from ugro.core.support.codec import dumps
from ugro.core.support.secret import is_secret
from ugro.web.access import may_launch
from ugro.web.site import Site, own_user

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
