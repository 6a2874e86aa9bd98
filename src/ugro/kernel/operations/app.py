"""The HTTP API on the agent's socket. A route parses the request, calls the agent and answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException

import ugro
from ugro.features.discovery import service as cluster_files
from ugro.features.discovery.api import add_discovery_routes
from ugro.features.discovery.sources import ssh_config_hosts
from ugro.features.environments.service.setup import SetupService
from ugro.features.exec.service import Command
from ugro.features.experiments.api import add_note_routes
from ugro.features.planning.api import add_planning_routes
from ugro.features.power.api import add_power_routes
from ugro.features.recipes.api import add_recipe_routes
from ugro.features.remote_access.api import UPLOAD_PATH, RemoteClients, add_remote_routes
from ugro.features.services.api import add_service_routes
from ugro.features.sweeps.api import add_sweep_routes
from ugro.features.training.api import add_profile_routes
from ugro.kernel.access.api import add_audit_routes, add_identity_routes
from ugro.kernel.access.caller import may_read_files
from ugro.kernel.access.gate import CALLER, Gate, SocketCallers, who
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.model import ClusterWish, ServedFile
from ugro.kernel.files.api import add_code_routes, add_result_file_routes
from ugro.kernel.files.client_files import expect_local
from ugro.kernel.jobs.api import add_job_routes, add_job_streams, add_result_routes
from ugro.kernel.links.api import add_tunnel_routes
from ugro.kernel.links.host_keys import host_spec
from ugro.kernel.operations.access_rules import RULES
from ugro.kernel.operations.audit_rules import TUNNEL_PATH
from ugro.kernel.operations.audit_trail import AuditTrail, LocalProtocol
from ugro.kernel.operations.door import BodyLimit
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.responses import Body, LiveResponse, internal_error, json_response, ndjson
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.kernel.telemetry.api import add_watch_routes
from ugro.node import foreign

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
_WITHOUT_STORE = ("/v1/agent", "/v1/agent/stop", "/v1/cluster", "/v1/doctor", "/v1/exec", "/v1/ssh-hosts")
Names = Annotated[list[str], Query(alias="node")]


class ClusterBody(Body):
    path: str | None
    found: bool = False


class ReconcileBody(Body):
    how: Literal["adopt", "forget"]
    skip_unreachable: bool = False


class ClusterFileBody(Body):
    path: str
    wish: ClusterWish


class NodeBody(Body):
    name: str
    fields: dict[str, Any] = Field(default_factory=dict)


class DrainBody(Body):
    reason: str = ""


class TrustBody(Body):
    fingerprints: list[str]
    replace: bool = False
    ssh_config: str | None = None


class ExecBody(Body):
    key: str
    nodes: list[str]
    argv: list[str] = Field(min_length=1)
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    grace_s: float = Field(default=5.0, ge=0, le=600)


class ExamineBody(Body):
    hosts: list[str]
    ssh_config: str | None = None


def create_app(agent: Agent) -> FastAPI:
    async def look_first(request: Request) -> None:
        refuse_without_store(agent, request.url.path)
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
    _add_agent_routes(app, agent)
    _add_cluster_routes(app, agent)
    _add_node_routes(app, agent)
    _add_host_key_routes(app, agent)
    _add_command_routes(app, agent)
    add_code_routes(app, agent)
    _add_all_job_routes(app, agent)
    add_watch_routes(app, agent)
    add_audit_routes(app, agent.audit)
    add_identity_routes(app)
    services = (
        agent.tokens,
        agent.team,
        agent.hooks,
        agent.usage,
        agent.hardware,
        agent.kept_environments,
        SetupService(agent.cluster, agent.health, agent.jobs, agent.python_envs),
        agent.ray_clusters,
        agent.services,
    )
    add_operations(app, requests(), handlers_of(services))
    add_discovery_routes(app, agent.discovery)
    add_tunnel_routes(app, agent.tunnels, agent.audit)
    add_power_routes(app, agent.power)
    add_remote_routes(app, agent.code)
    return app


def _add_all_job_routes(app: FastAPI, agent: Agent) -> None:
    add_job_routes(app, agent.jobs)
    add_job_streams(app, agent.jobs)
    add_result_routes(app, agent.jobs, agent.results)
    add_result_file_routes(app, agent.jobs, agent.results)
    add_note_routes(app, agent.jobs, agent.store.notes)
    add_profile_routes(app, agent.jobs, agent.profiling)
    add_planning_routes(app, agent.planning)
    add_recipe_routes(app, agent.recipes)
    add_sweep_routes(app, agent.sweeps)
    add_service_routes(app, agent.services)


def refuse_without_store(agent: Agent, path: str) -> None:
    """A request would wait until the store is back. What says so, and what stops the agent, needs none."""
    if (away := agent.store.away) is not None and path not in _WITHOUT_STORE:
        raise away


def _add_agent_routes(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/agent")
    async def agent_status(request: Request) -> Response:
        if (socket := request.headers.get("ugro-ssh-auth-sock")) is not None and may_read_files():
            agent.cluster.remember_environment({"SSH_AUTH_SOCK": socket})
        return json_response(agent.status(_settings(request.headers.get("ugro-settings"))))

    @app.post("/v1/agent/stop", status_code=204)
    async def stop(pid: int | None = None, only_if_idle: bool = False) -> None:
        agent.stop(pid, only_if_idle=only_if_idle)

    @app.get("/v1/agent/reconcile")
    async def reconciliation() -> Response:
        """What each decision would do."""
        return json_response(await agent.reconciler.plan())

    @app.post("/v1/agent/reconcile")
    async def reconcile(body: ReconcileBody) -> Response:
        decide = agent.reconciler.adopt if body.how == "adopt" else agent.reconciler.forget
        return json_response(await decide(skips_unasked=body.skip_unreachable))

    @app.post("/v1/dashboard")
    async def dashboard(request: Request) -> Response:
        return json_response(await agent.dashboard.link(request.scope[CALLER].user))


def _add_cluster_routes(app: FastAPI, agent: Agent) -> None:
    @app.put("/v1/cluster", status_code=204)
    async def use_cluster(body: ClusterBody) -> None:
        await agent.use_cluster(ServedFile(Path(body.path) if body.path else None, is_found=body.found))

    @app.get("/v1/cluster/file")
    async def cluster_file(path: str) -> Response:
        return json_response(await asyncio.to_thread(cluster_files.read, Path(path)))

    @app.put("/v1/cluster/file", status_code=204)
    async def write_cluster_file(body: ClusterFileBody) -> None:
        await asyncio.to_thread(cluster_files.write, Path(body.path), body.wish, agent.allowances)

    @app.post("/v1/cluster/reload", status_code=204)
    async def reload_cluster() -> None:
        await agent.cluster.look_again()


def _settings(header: str | None) -> Mapping[str, str] | None:
    """The UGRO_* variables of the client; None if it has sent none, as another program would."""
    try:
        found = foreign.parsed(header or "null")
    except ValueError:
        return None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None


def _add_node_routes(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/health")
    async def health(names: Names = []) -> Response:  # noqa: B006  # FastAPI copies it for each request
        """Probes nodes now: a report of each, as soon as it answers."""
        agent.cluster.inventory.select(names)  # an unknown name is an error before the stream begins
        return LiveResponse(ndjson(agent.reports(names)), "application/x-ndjson")

    @app.get("/v1/best")
    async def best() -> Response:
        """The node that a job would get, and why."""
        return json_response(await agent.best())

    @app.post("/v1/nodes", status_code=204)
    async def add(body: NodeBody) -> None:
        await agent.add_node(body.name, body.fields)

    @app.delete("/v1/nodes/{name:path}", status_code=204)
    async def remove(name: str, only_if_idle: bool = False, even_with_jobs: bool = False) -> None:
        await agent.remove_node(name, only_if_idle=only_if_idle, even_with_jobs=even_with_jobs)

    @app.post("/v1/nodes/{name:path}/drain", status_code=204)
    async def drain(name: str, body: DrainBody) -> None:
        await agent.drain(name, body.reason)

    @app.post("/v1/nodes/{name:path}/resume", status_code=204)
    async def resume(name: str) -> None:
        await agent.resume(name)


def _add_host_key_routes(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/nodes/{name:path}/hostkey")
    async def host_key(name: str, ssh_config: str | None = None) -> Response:
        return json_response(await agent.hosts.host_key(name, ssh_config))

    @app.post("/v1/nodes/{name:path}/hostkey")
    async def trust(name: str, body: TrustBody) -> Response:
        _expect_own_config(body.ssh_config)
        shown = tuple(body.fingerprints)
        return json_response(await agent.hosts.trust(name, shown, replace=body.replace, ssh_config=body.ssh_config))


def _expect_own_config(ssh_config: str | None) -> None:
    if ssh_config is not None:
        expect_local(f"the ssh configuration {ssh_config}", "the master uses its own")


def _add_command_routes(app: FastAPI, agent: Agent) -> None:
    @app.post("/v1/exec")
    async def execute(body: ExecBody) -> Response:
        agent.cluster.inventory.select(body.nodes)
        command = Command(tuple(body.argv), body.cwd, tuple(body.env.items()), body.grace_s)
        return LiveResponse(agent.execute(body.key, body.nodes, command), "application/vnd.ugro.frames")

    @app.delete("/v1/exec/{key}", status_code=204)
    async def cancel(key: str) -> None:
        agent.cancel(key)

    @app.get("/v1/doctor")
    async def doctor(names: Names = []) -> Response:  # noqa: B006  # as above
        agent.cluster.inventory.select(names)
        return LiveResponse(ndjson(agent.diagnose(names)), "application/x-ndjson")

    @app.post("/v1/examine")
    async def examine(body: ExamineBody) -> Response:
        _expect_own_config(body.ssh_config)
        specs = [host_spec(word, agent.cluster.config.remote_root) for word in body.hosts]
        return LiveResponse(ndjson(agent.hosts.examine(specs, body.ssh_config)), "application/x-ndjson")

    @app.get("/v1/ssh-hosts")
    async def ssh_hosts(ssh_config: str | None = None) -> list[str]:
        return ssh_config_hosts(Path(ssh_config or agent.cluster.config.ssh.config_file or "~/.ssh/config"))


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
