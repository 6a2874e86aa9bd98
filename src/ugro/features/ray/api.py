"""The API's routes for Ray clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from pydantic import Field

from ugro.features.ray.model import ClusterWish
from ugro.kernel.access.caller import SeenUser
from ugro.kernel.access.gate import who
from ugro.kernel.access.model import AuditEntry
from ugro.kernel.agent.agent import Agent
from ugro.kernel.config.kinds import BadValueError, Environment
from ugro.kernel.config.section import is_job_name
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.operations.audit_rules import READ_TOKEN
from ugro.kernel.operations.audit_trail import DONE, now
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson
from ugro.kernel.support.errors import UsageError

_ONLY = "-"  # in the place of a name: the only one that has not ended
_LONGEST_NAME = 48  # its jobs have longer ones


class StartBody(Body):
    wish: ClusterWish
    user: SeenUser
    fields: dict[str, Any] = Field(default_factory=dict)  # of its Python environment
    here: Path = Path("/")
    env: dict[str, str] | None = None  # None: the client has not been asked for variables yet

    def submit(self) -> Submit:
        return Submit(self.user, "", None, self.fields, self.here, self.env, as_options=True)


class ScaleBody(Body):
    workers: int


def add_ray_cluster_routes(app: FastAPI, agent: Agent) -> None:
    clusters = agent.ray_clusters

    @app.post("/v1/ray-clusters")
    async def start(body: StartBody) -> Response:
        """``{"progress"}`` repeatedly, then ``{"cluster"}``; or ``{"needs"}``: variables that the client must send."""
        _check(body.wish)
        agent.jobs.expect_submittable()
        environment = await agent.jobs.environment(body.submit())
        if isinstance(environment, Needs):
            return json_response({"needs": environment.variables})
        return LiveResponse(ndjson(clusters.start(body.wish, body.user, environment)), "application/x-ndjson")

    @app.get("/v1/ray-clusters")
    async def listed(everything: Annotated[bool, Query(alias="all")] = False) -> Response:
        return json_response({"clusters": await clusters.listed(everything=everything)})

    @app.get("/v1/ray-clusters/{name}")
    async def get(name: str) -> Response:
        return json_response({"cluster": await clusters.get(_name(name))})

    @app.get("/v1/ray-clusters/{name}/access")
    async def access(request: Request, name: str) -> Response:
        """With the token."""
        owner, found = await clusters.access(_name(name))
        _note_reader(agent, request, found.name, owner)
        return json_response({"access": found})

    @app.post("/v1/ray-clusters/{name}/scale")
    async def scale(name: str, body: ScaleBody) -> Response:
        return json_response({"cluster": await clusters.scale(_name(name), body.workers)})

    @app.delete("/v1/ray-clusters/{name}")
    async def stop(name: str) -> Response:
        return json_response({"cluster": await clusters.stop(_name(name))})


def _note_reader(agent: Agent, request: Request, cluster: str, owner: str) -> None:
    """An operator who has read the token can act as the cluster's owner there from now on."""
    user, via = who(request.scope)
    if user != owner:
        agent.audit.note(AuditEntry(now(), user, via, READ_TOKEN, f"{cluster} of {owner}", DONE))


def _name(word: str) -> str | None:
    return None if word == _ONLY else word


def _check(wish: ClusterWish) -> None:
    if not is_job_name(wish.name) or len(wish.name) > _LONGEST_NAME or wish.name == _ONLY:
        raise UsageError(
            f"not a cluster's name: {wish.name!r:.60}",
            hint=f"letters, digits, dots and dashes, at most {_LONGEST_NAME}",
        )
    if wish.workers_per_node < 1 or (wish.nodes is not None and wish.nodes < 1):
        raise UsageError("a cluster starts with at least one worker on one node", hint="ugro cluster start --nodes 3")
    try:
        Environment().parse(dict(wish.env))
    except BadValueError as error:
        raise UsageError(f"--env: {error.message}", hint=error.hint or "--env HF_HOME=/data/hf") from error
    if wish.size.cpus is not None and wish.size.cpus < 1:
        raise UsageError("a worker has at least one CPU", hint="--cpus 4")
