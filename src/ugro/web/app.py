"""The dashboard's application: the gate, the pages, what passes to the API, the stream, the static files."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ugro.agent.agent import Agent
from ugro.agent.api.app import http_status
from ugro.core.errors import NotFound, UgroError, UsageError
from ugro.web.access import COOKIE_S, Doors, Gate
from ugro.web.live import add_live
from ugro.web.pages.cluster import add_cluster_pages
from ugro.web.pages.experiments import add_experiment_pages
from ugro.web.pages.jobs import add_job_pages
from ugro.web.pages.settings import add_settings_pages
from ugro.web.passing import Passing
from ugro.web.site import STATIC, Site


def create_web(agent: Agent, api: ASGIApp, doors: Doors) -> FastAPI:
    app = FastAPI(title="UGRO", docs_url=None, redoc_url=None, openapi_url=None)
    site = Site(agent)
    _add_errors(app, site)
    _add_doors(app, site, doors)
    add_cluster_pages(app, site)
    add_job_pages(app, site)
    add_experiment_pages(app, site)
    add_settings_pages(app, site)
    add_live(app, agent)
    app.mount("/v1", Passing(api))
    app.router.routes.append(Route("/metrics", api, methods=["GET"]))  # Prometheus cannot ask a unix socket
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(Gate, doors=doors, stranger=site.stranger)
    return app


def _add_doors(app: FastAPI, site: Site, doors: Doors) -> None:
    @app.get("/login")
    async def login(once: str = "", to: str = "/") -> Response:
        if not doors.tokens.take(once, time.time()):
            return site.stranger()
        # Browsers take a second slash, of either kind, for the beginning of another site.
        response = site.welcome(to if to.startswith("/") and to[1:2] not in ("/", "\\") else "/")
        response.set_cookie(
            doors.cookie_name,
            doors.tokens.cookie(time.time()),
            max_age=COOKIE_S,
            httponly=True,
            samesite="strict",
            secure=doors.is_encrypted,
        )
        return response

    @app.post("/logout")
    async def logout() -> Response:
        response = Response(status_code=303, headers={"location": "/"})
        response.delete_cookie(doors.cookie_name)
        return response


def _add_errors(app: FastAPI, site: Site) -> None:
    @app.exception_handler(UgroError)
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, UgroError)
        return await site.error(request, error, http_status(error))

    @app.exception_handler(RequestValidationError)
    async def bad(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return await site.error(request, UsageError(f"{where}: {first['msg']}"), 400)

    @app.exception_handler(500)
    async def ours(request: Request, error: Exception) -> Response:
        # The server logs it with its traceback.
        bug = UgroError("something is wrong with this page, not with your jobs", hint="see: ugro agent logs")
        return await site.error(request, bug, 500)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = "there is no such page" if error.status_code == 404 else str(error.detail).lower()
        return await site.error(request, NotFound(words, hint="begin at the cluster page"), error.status_code)
