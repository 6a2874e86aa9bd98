"""The dashboard's listener, beside the agent's socket. It opens with the agent, and again when its settings change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from fastapi import FastAPI

from ugro.agent.agent import Agent
from ugro.agent.door import Door
from ugro.config.dashboard import Dashboard
from ugro.core.agent import DashboardLink
from ugro.core.errors import NotAllowed, UgroError
from ugro.core.support.clock import boot_clock_s
from ugro.core.support.loopback import is_loopback
from ugro.web.access import AccessSettings, WhoSigned
from ugro.web.api_server import serve_api
from ugro.web.app import create_web
from ugro.web.listening import POLL_S, listen, make_server, try_certificate
from ugro.web.tokens import LINK_LIFETIME_S, Tokens

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
