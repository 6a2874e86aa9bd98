"""The HTTP API on the agent's socket. A route parses the request, calls the agent and answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import ugro
from ugro.features.discovery.service import ClusterFiles
from ugro.features.environments.service.setup import SetupService
from ugro.features.experiments.service import ExperimentRequests
from ugro.features.planning.api import add_planning_routes
from ugro.features.recipes.api import add_recipe_routes
from ugro.features.remote_access.api import UPLOAD_PATH, RemoteClients, add_remote_routes
from ugro.features.services.api import add_service_routes
from ugro.features.sweeps.api import add_sweep_routes
from ugro.features.training.service import TrainingLooks
from ugro.kernel.access.gate import Gate, SocketCallers, who
from ugro.kernel.agent.agent import Agent
from ugro.kernel.feature import import_object, installed
from ugro.kernel.files.service import CodeRequests, ResultRequests
from ugro.kernel.links.api import TunnelConnections
from ugro.kernel.operations.access_rules import RULES
from ugro.kernel.operations.audit_rules import TUNNEL_PATH
from ugro.kernel.operations.audit_trail import AuditTrail, LocalProtocol
from ugro.kernel.operations.door import BodyLimit
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.openapi import Description
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.responses import internal_error
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.kernel.telemetry.api import add_watch_routes
from ugro.kernel.telemetry.requests import MetricRequests

_HTTP_STATUS = {
    "usage": 400,
    "config": 400,
    "unallowed": 400,
    "not_allowed": 403,
    "safe_mode": 403,
    "not_found": 404,
    "unsatisfiable": 409,
    "wanted": 428,
    "unreachable": 503,
    "timed_out": 504,
    "store_away": 503,
}
_WITHOUT_STORE = {kind.operation.route for kind in requests() if kind.operation.without_store}


def create_app(agent: Agent) -> FastAPI:
    async def look_first(request: Request) -> None:
        if f"{request.method} {request.scope['route'].path}" not in _WITHOUT_STORE:
            refuse_without_store(agent)
        # Before every request, so that a request after an edit of the cluster file uses the new one. It costs a stat.
        await agent.cluster.look_again()

    app = FastAPI(
        title="UGRO",
        version=ugro.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # a route of our own, which states its role as all others
        dependencies=[Depends(look_first)],
    )
    Gate(agent, RULES).guard(app)
    answer_errors(app)
    _add_all_job_routes(app, agent)
    add_watch_routes(app, agent)
    add_operations(app, requests(), handlers_of(_services(app, agent)))
    add_remote_routes(app, agent.code)
    return app


def _services(app: FastAPI, agent: Agent) -> tuple[object, ...]:
    """What answers declared requests."""
    return (
        agent,
        agent.audit,
        agent.dashboard,
        agent.discovery,
        agent.executions,
        agent.hardware,
        agent.health,
        agent.hooks,
        agent.hosts,
        agent.jobs,
        agent.kept_environments,
        agent.monitoring,
        agent.monitoring.monitor,
        agent.power,
        agent.parts.profiling,
        agent.ray_clusters,
        agent.parts.reconciler,
        agent.services,
        agent.sweeps,
        agent.team,
        agent.tokens,
        agent.usage,
        ClusterFiles(agent.allowances),
        CodeRequests(agent.cluster, agent.code, agent.parts.engine.logins),
        Description(app),
        ExperimentRequests(agent.jobs, agent.store.notes, agent.results),
        MetricRequests(agent.jobs, agent.cluster, agent.monitoring),
        ResultRequests(agent.jobs, agent.results),
        SetupService(agent.cluster, agent.health, agent.jobs, agent.python_envs),
        TrainingLooks(agent.jobs, agent.monitoring.headlines, agent.monitoring.energy),
        TunnelConnections(agent.tunnels, agent.audit),
        *(import_object(feature.service)(agent) for feature in installed() if feature.service),
    )


def _add_all_job_routes(app: FastAPI, agent: Agent) -> None:
    add_planning_routes(app, agent.parts.planning)
    add_recipe_routes(app, agent.parts.recipes)
    add_sweep_routes(app, agent.sweeps)
    add_service_routes(app, agent.services)


def refuse_without_store(agent: Agent) -> None:
    """A request would wait until the store is back. What says so, and what stops the agent, needs none."""
    if (away := agent.store.away) is not None:
        raise away


def answer_errors(app: FastAPI) -> None:
    app.exception_handler(UgroError)(_answer_error)
    app.exception_handler(RequestValidationError)(_answer_bad_request)
    app.exception_handler(HTTPException)(_answer_unknown)
    app.exception_handler(Exception)(_answer_bug)  # the server logs its traceback, too


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UgroError)
    return Response(dumps({"error": error.to_wire()}), http_status(error), media_type="application/json")


def http_status(error: UgroError) -> int:
    return _HTTP_STATUS.get(error.kind, 500)


async def _answer_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    if not where and "json" not in request.headers.get("content-type", ""):
        hint = "send it with the header Content-Type: application/json"
        return await _answer_error(request, UsageError("the body is not declared as JSON", hint=hint))
    return await _answer_error(request, UsageError(f"{where}: {first['msg']}" if where else first["msg"]))


async def _answer_unknown(request: Request, error: Exception) -> Response:
    """No route has this path, or the path has none with this method; also a body that is no text."""
    assert isinstance(error, HTTPException)
    kind = NotFound if error.status_code == 404 else UsageError
    shown = kind(f"{request.method} {request.url.path:.200}: {error.detail.lower()}")
    return Response(dumps({"error": shown.to_wire()}), error.status_code, error.headers, media_type="application/json")


async def _answer_bug(request: Request, error: Exception) -> Response:
    return await _answer_error(request, internal_error(error))


# --- server -----------------------------------------------------------------------------------------------------------
# The server of the agent's API. A module of its own, because its imports are slow.


_GOODBYE_S = 2
_LARGEST_BODY = 64 << 20  # on the owner's socket; ten thousand jobs at once take a few MiB
_LARGEST_BODY_OF_MEMBERS = 4 << 20  # as objects, it takes twenty times as much
STREAMS = (TUNNEL_PATH, UPLOAD_PATH)  # their bodies are passed on piece by piece, as long as that takes


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own handler raises the signal again after serving, which would end the agent too early.
        yield


def make_server(agent: Agent) -> tuple[Server, FastAPI]:
    api = create_app(agent)
    return socket_server(agent, api), api


def socket_server(agent: Agent, api: FastAPI, *, is_of_team: bool = False) -> Server:
    """``is_of_team``: for the socket that members of the team open, through a door, instead of the owner's."""
    hint = "submit fewer jobs at once, and put data into files"
    remote = RemoteClients(api, agent.code.offers)
    most_bytes = _LARGEST_BODY_OF_MEMBERS if is_of_team else _LARGEST_BODY
    bounded = BodyLimit(remote, most_bytes=most_bytes, hint=hint, streams=STREAMS)
    recorded = AuditTrail(bounded, agent.audit, who)
    known = SocketCallers(recorded, agent.team, is_of_team=is_of_team)
    return Server(
        uvicorn.Config(
            known,
            http=LocalProtocol,
            ws="none",
            proxy_headers=False,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=_GOODBYE_S,
            reset_contextvars=True,  # a request must not inherit the caller of the one before it on its connection
        )
    )
