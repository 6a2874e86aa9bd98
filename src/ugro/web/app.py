"""The dashboard's application: access control, pages, allowed API routes, the live stream and static files."""

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
from ugro.web.access import COOKIE_LIFETIME_S, AccessControl, AccessSettings
from ugro.web.api_allowlist import AllowedApi
from ugro.web.live import add_live
from ugro.web.pages.cluster import add_cluster_pages
from ugro.web.pages.experiments import add_experiment_pages
from ugro.web.pages.jobs import add_job_pages
from ugro.web.pages.launch import add_launch_pages
from ugro.web.pages.settings import add_settings_pages
from ugro.web.site import STATIC, Site


def create_web(agent: Agent, api: ASGIApp, access: AccessSettings) -> FastAPI:
    app = FastAPI(title="UGRO", docs_url=None, redoc_url=None, openapi_url=None)
    site = Site(agent)
    _add_errors(app, site)
    _add_login(app, site, access)
    add_cluster_pages(app, site)
    add_job_pages(app, site)
    add_launch_pages(app, site)
    add_experiment_pages(app, site)
    add_settings_pages(app, site)
    add_live(app, agent)
    app.mount("/v1", AllowedApi(api))
    app.router.routes.append(Route("/metrics", api, methods=["GET"]))  # Prometheus cannot scrape a unix socket
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(AccessControl, settings=access, sign_in_page=site.sign_in)
    return app


def _add_login(app: FastAPI, site: Site, access: AccessSettings) -> None:
    @app.get("/login")
    async def login(once: str = "", to: str = "/") -> Response:
        if not access.tokens.take(once, time.time()):
            return site.sign_in()
        # Browsers treat a second slash, of either kind, as the start of another host.
        response = site.welcome(to if to.startswith("/") and to[1:2] not in ("/", "\\") else "/")
        response.set_cookie(
            access.cookie_name,
            access.tokens.cookie(time.time()),
            max_age=COOKIE_LIFETIME_S,
            httponly=True,
            samesite="strict",
            secure=access.is_encrypted,
        )
        return response

    @app.post("/logout")
    async def logout() -> Response:
        response = Response(status_code=303, headers={"location": "/"})
        response.delete_cookie(access.cookie_name)
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
    async def bug(request: Request, error: Exception) -> Response:
        # The server logs it with its traceback.
        bug = UgroError("this page failed; your jobs are not affected", hint="see: ugro agent logs")
        return await site.error(request, bug, 500)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = "page not found" if error.status_code == 404 else str(error.detail).lower()
        return await site.error(request, NotFound(words, hint="start at the cluster page"), error.status_code)
