"""The dashboard's application: access control, pages, allowed API routes, the live stream and static files."""

from __future__ import annotations

import time
from urllib.parse import parse_qsl, quote

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from ugro.agent.agent import Agent
from ugro.agent.api.access_rules import PAGES
from ugro.agent.api.app import http_status, refuse_without_store
from ugro.agent.api.audit_trail import AuditTrail
from ugro.agent.api.gate import CALLER, Gate, who
from ugro.core.errors import NotFound, UgroError, UsageError
from ugro.core.support.clock import boot_clock_s
from ugro.web.access import SESSION, AccessControl, AccessSettings
from ugro.web.api_allowlist import AllowedApi
from ugro.web.live import add_live
from ugro.web.pages.cluster import add_cluster_pages
from ugro.web.pages.experiments import add_experiment_pages
from ugro.web.pages.hardware import add_hardware_pages
from ugro.web.pages.jobs import add_job_pages
from ugro.web.pages.launch import add_launch_pages
from ugro.web.pages.services import add_service_pages
from ugro.web.pages.settings import add_settings_pages
from ugro.web.pages.sweeps import add_sweep_pages
from ugro.web.pages.usage import add_usage_pages
from ugro.web.site import STATIC, Site
from ugro.web.tokens import COOKIE_LIFETIME_S

_WITHOUT_STORE = ("/login", "/logout")


def create_web(agent: Agent, api: ASGIApp, access: AccessSettings) -> ASGIApp:
    site = Site(agent)
    # Around all pages, so that even the answer to a request that failed has its headers.
    guarded = AccessControl(create_pages(site, api, access), access, site.sign_in)
    return AuditTrail(guarded, agent.audit, who, _is_stranger)


def _is_stranger(scope: Scope) -> bool:
    return scope.get(SESSION) is None


def create_pages(site: Site, api: ASGIApp, access: AccessSettings) -> FastAPI:
    async def look_first(request: Request) -> None:
        if request.url.path not in _WITHOUT_STORE:
            refuse_without_store(site.agent, request.url.path)

    first = [Depends(look_first)]
    app = FastAPI(title="UGRO", docs_url=None, redoc_url=None, openapi_url=None, dependencies=first)
    Gate(site.agent, PAGES).guard(app)
    _add_errors(app, site)
    _add_login(app, site, access)
    add_cluster_pages(app, site)
    add_job_pages(app, site)
    add_launch_pages(app, site)
    add_experiment_pages(app, site)
    add_hardware_pages(app, site)
    add_sweep_pages(app, site)
    add_service_pages(app, site)
    add_usage_pages(app, site)
    add_settings_pages(app, site)
    add_live(app, site.agent)
    app.mount("/v1", AllowedApi(api))
    app.router.routes.append(Route("/metrics", api, methods=["GET"]))  # Prometheus cannot scrape a unix socket
    app.mount("/static", StaticFiles(directory=STATIC))
    return app


def _add_login(app: FastAPI, site: Site, access: AccessSettings) -> None:
    tokens = access.tokens

    @app.get("/login")
    async def offer(once: str = "", to: str = "/") -> Response:
        """A GET changes nothing: programs that look at links before people do must not use them up."""
        return site.sign_in(once, to)

    @app.post("/login")
    async def login(request: Request) -> Response:
        given = dict(parse_qsl((await request.body()).decode("ascii", "replace")))
        to = {"location": _own_path(given.get("to", "/"))}
        user = tokens.take(given.get("once", ""), boot_clock_s())
        if user is None:
            return site.sign_in() if request.scope[SESSION] is None else Response(status_code=303, headers=to)
        address = request.client.host if request.client else "unknown"
        request.scope[CALLER] = await access.caller(user, f"browser, {address}")
        response = Response(status_code=303, headers=to)
        response.set_cookie(
            access.cookie_name,
            tokens.sessions.begin(time.time(), user),
            max_age=COOKIE_LIFETIME_S,
            httponly=True,
            samesite="strict",
            secure=access.is_encrypted,
        )
        return response

    @app.post("/logout")
    async def logout(request: Request) -> Response:
        tokens.sessions.end(request.scope[SESSION])
        access.streams.end(request.scope[SESSION])
        response = Response(status_code=303, headers={"location": "/"})
        response.delete_cookie(access.cookie_name)
        return response


def _own_path(to: str) -> str:
    """Browsers treat a second slash, of either kind, as the start of another host."""
    is_own = to.startswith("/") and to[1:2] not in ("/", "\\") and to.isprintable()
    return quote(to, safe="/?&=%#,+:;@!$'()*~-._") if is_own else "/"


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

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: Exception) -> Response:
        # Nobody reads it. As a failure of ours it would be logged: anybody could fill the log.
        return Response(status_code=499)

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
