"""The dashboard's application: access control, pages, allowed API routes, the live stream and static files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncGenerator
from importlib import import_module
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from ugro.kernel.access.gate import CALLER, Gate, who
from ugro.kernel.access.model import is_loopback
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.model import DashboardLink
from ugro.kernel.feature import installed
from ugro.kernel.operations.access_rules import PAGES
from ugro.kernel.operations.app import http_status, refuse_without_store
from ugro.kernel.operations.audit_trail import AuditTrail
from ugro.kernel.operations.door import Door
from ugro.kernel.operations.responses import LiveResponse
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError
from ugro.kernel.support.moments import boot_clock_s
from ugro.kernel.telemetry.operations import Change
from ugro.web.access import (
    COOKIE_LIFETIME_S,
    LINK_LIFETIME_S,
    SESSION,
    AccessControl,
    AccessSettings,
    Tokens,
    WhoSigned,
)
from ugro.web.api_allowlist import AllowedApi
from ugro.web.api_server import POLL_S, listen, make_server, serve_api, try_certificate
from ugro.web.config import Dashboard
from ugro.web.pages.cluster import add_cluster_pages
from ugro.web.pages.jobs import add_job_pages, add_launch_pages
from ugro.web.pages.settings import add_settings_pages
from ugro.web.site import STATIC, Site

# --- live -------------------------------------------------------------------------------------------------------------
# The stream that keeps pages up to date: server-sent events, whose id is the number of the last event.
#
# A browser that reconnects sends the id that it has seen and receives all events after it. Node reports are sent again.


_HEARTBEAT_S = 5.0
_RETRY_MS = 1000
_LARGEST = 1 << 53


def add_live(app: FastAPI, agent: Agent) -> None:
    @app.get("/live")
    async def live(
        after: Annotated[int | None, Query(ge=0, lt=_LARGEST)] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        seen = int(last_event_id) if last_event_id and last_event_id.isdecimal() else after
        newest = await agent.store.ends.newest()
        # A larger number is from another agent's database: start at our newest.
        begin = newest if seen is None else min(seen, newest)
        return LiveResponse(_events(agent, begin), "text/event-stream")


async def _events(agent: Agent, after: int) -> AsyncGenerator[bytes]:
    yield f"retry: {_RETRY_MS}\nid: {after}\n{_event('beat', {'now': time.time()})}".encode()
    try:
        async with contextlib.aclosing(_with_heartbeats(agent.monitoring.changes(after))) as batches:
            async for batch in batches:
                yield "".join(batch).encode()
    except UgroError as error:
        yield _event("bye", error.to_wire()).encode()


async def _with_heartbeats(changes: AsyncGenerator[list[Change]]) -> AsyncGenerator[list[str]]:
    """Adds a heartbeat every few seconds, because a page cannot tell silence from a cut connection."""
    pending: asyncio.Task[list[Change]] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([pending], timeout=_HEARTBEAT_S)
            if not done:
                yield [_event("beat", {"now": time.time()})]
                continue
            lines = pending.result()
            pending = None
            yield [f"id: {line['cursor']}\ndata: {dumps(line)}\n\n" for line in lines]
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])
        await changes.aclose()


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {dumps(value)}\n\n"


# --- app --------------------------------------------------------------------------------------------------------------


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
            refuse_without_store(site.agent)

    first = [Depends(look_first)]
    app = FastAPI(title="UGRO", docs_url=None, redoc_url=None, openapi_url=None, dependencies=first)
    Gate(site.agent, PAGES).guard(app)
    _add_errors(app, site)
    _add_login(app, site, access)
    add_cluster_pages(app, site)
    add_job_pages(app, site)
    add_launch_pages(app, site)
    for feature in installed():
        if feature.pages:
            import_module(f"{feature.package}.pages").add_pages(app, site)
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


# --- serve ------------------------------------------------------------------------------------------------------------
# The dashboard's listener, beside the agent's socket. It opens with the agent, and again when its settings change.


log = logging.getLogger(__name__)


async def serve_web(agent: Agent, api: FastAPI) -> None:
    """The dashboard, and the HTTPS API for programs elsewhere."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_serve_dashboard(agent, api), name="dashboard")
        group.create_task(serve_api(agent, api), name="HTTPS API")


async def _serve_dashboard(agent: Agent, api: FastAPI) -> None:
    """Serves until the agent stops. A dashboard that fails, even by a bug of ours, does not affect jobs."""
    while not agent.stopping.is_set():
        settings = agent.cluster.config.dashboard
        serving = asyncio.create_task(_serve(agent, api, settings), name="dashboard")
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
        if (problem := serving.exception()) is not None:
            agent.dashboard.closed(_as_error(problem))
            await _until_changed(agent, settings)


def _as_error(problem: BaseException) -> UgroError:
    if isinstance(problem, UgroError):
        log.warning("dashboard not available: %s", problem)
        return problem
    log.error("the dashboard failed", exc_info=problem)
    return UgroError("the dashboard failed", hint="see: ugro agent logs")


async def _serve(agent: Agent, api: FastAPI, settings: Dashboard) -> None:
    if not settings.enabled:
        raise NotAllowed("the dashboard is disabled", hint="set dashboard.enabled to true in the cluster file")
    try:
        try_certificate(settings.certificate_file, settings.key_file)
        tokens = Tokens(agent.home.path / "dashboard.token")
        listener = listen(settings.host, settings.port, may_move=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotAllowed(f"cannot open the dashboard: {reason}", hint=_hint(settings)) from error
    with listener:
        endpoint = Endpoint(settings, listener.getsockname()[1], tokens, agent.team.browser)
        app = create_web(agent, api, endpoint.access)
        server = make_server(app, settings.certificate_file, settings.key_file)
        log.info("dashboard at %s", endpoint.url)
        agent.dashboard.opened(endpoint.link)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([]), name="serve the dashboard")
            accepting = group.create_task(Door(server).serve(listener), name="the dashboard's door")
            await _until_changed(agent, settings)
            accepting.cancel()
            server.should_exit = True


def _hint(settings: Dashboard) -> str:
    files = f", certificate_file {settings.certificate_file}" if settings.certificate_file else ""
    return f"see dashboard in the cluster file: host {settings.host}, port {settings.port}{files}"


async def _until_changed(agent: Agent, settings: Dashboard) -> None:
    while agent.cluster.config.dashboard == settings and not agent.stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(agent.stopping.wait(), POLL_S)


class Endpoint:
    """The address of an open dashboard, and its sign-in links."""

    def __init__(self, settings: Dashboard, port: int, tokens: Tokens, caller: WhoSigned) -> None:
        self._is_encrypted = settings.certificate_file is not None
        self._is_open = not is_loopback(settings.host)
        scheme = "https" if self._is_encrypted else "http"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        if settings.host in ("0.0.0.0", "::"):
            host = settings.names[0] if settings.names else socket.gethostname()
        self.url = f"{scheme}://{host}:{port}"
        names = frozenset(name.lower() for name in (settings.host, *settings.names, *_own_names(self._is_open)))
        # Browsers keep cookies per host, not per port: two dashboards on one machine need different names.
        self.access = AccessSettings(tokens, names, f"ugro_{port}", caller, self._is_encrypted)

    def link(self, user: str) -> DashboardLink:
        word = self.access.tokens.link(boot_clock_s(), user)
        warning = None
        if self._is_open and not self._is_encrypted:
            warning = "other machines can reach the dashboard and it is not encrypted: eavesdroppers can use it"
        return DashboardLink(f"{self.url}/login?once={word}", LINK_LIFETIME_S, warning)


def _own_names(is_open: bool) -> tuple[str, ...]:
    return (socket.gethostname(),) if is_open else ()
