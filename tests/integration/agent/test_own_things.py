"""Sweeps, services and Ray clusters are their user's: by whatever name, and also if a name changes hands meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from starlette.types import Receive, Scope, Send

from tests.rig.identity import CLUSTER, Answer, ask, person, running_agent
from ugro.features.ray.model import ClusterState, ClusterWish, Head, RayCluster
from ugro.features.services.api import add_service_routes
from ugro.features.services.model import DoorPlace, Revision, Service, ServiceSpec, ServiceState
from ugro.features.sweeps.model import Budget, SweepState, TrialState
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.access.gate import Gate, who
from ugro.kernel.access.model import Role
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.operations.access_rules import RULES
from ugro.kernel.operations.app import answer_errors
from ugro.kernel.operations.audit_trail import AuditTrail
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.registry import requests
from ugro.kernel.support.codec import dumps

ANN, BOB = person("ann", Role.USER), person("bob", Role.USER)
VIEWER, OPERATOR, OWNER = (
    person("eve", Role.VIEWER),
    person("olga", Role.OPERATOR),
    person("root", Role.ADMIN, shares_account=True),
)
ALONE = replace(OWNER, is_alone=True)
SPACE: dict[str, Any] = {"method": "grid", "parameters": {"mode": {"values": ["a", "b"]}}}
HEAD = Head("here", "/bin/python", "10.0.0.1", 6379, 8265, "/nowhere")


def sweep(key: str, name: str, user: str, *, private: bool = False, document: dict[str, Any] = SPACE) -> NewSweep:
    return NewSweep(key, name, user, json.dumps(document), dumps(JobSpec("x", ("x",), private=private)), Budget())


def service(key: str, name: str, user: str, state: ServiceState = ServiceState.ACTIVE) -> Service:
    job = JobSpec(name, ("serve", "{port}"), env=(("DATA", "hush"),))
    door, revision = DoorPlace("here", "python3", "127.0.0.1"), Revision(1, job, "a test")
    spec = ServiceSpec(name, needs_keys=True)
    return Service(0, key, user, spec, door, 1, 1, (revision,), "s", state=state, request_key=key)


def ray(name: str, user: str, state: ClusterState = ClusterState.ACTIVE) -> RayCluster:
    return RayCluster(0, f"{name}-{user}", user, ClusterWish(name=name), HEAD, f"token of {user}", state=state)


def test_a_service_is_updated_by_its_own_user_alone(tmp_path: Path) -> None:
    """What an operator gives it would run with its variables, in the account of its user."""

    def update(key: str) -> dict[str, Any]:
        fields = {"command": ["sh", "-c", "env; serve {port}"], "sync": False, "cwd": "/"}
        return {"request": {"submit": {"user": "", "key": key, "fields": fields, "env": {}}}}

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            made = await agent.store.services.add(service("k", "chat", "ann"))
            for caller in (BOB, OPERATOR, OWNER):
                refused = await ask(api, "POST", "/v1/services/chat/update", caller=caller, body=update("k1"))
                assert refused.kind == "not_allowed", refused.body
                assert b"hint" in refused.body
            assert await agent.store.services.get(made.id) == made

            own = await ask(api, "POST", "/v1/services/chat/update", caller=ANN, body=update("k2"))
            assert own.status == 200, own.body
            assert dict((await agent.store.services.get(made.id)).of(2).job.env) == {"DATA": "hush"}
            back = await ask(api, "POST", "/v1/services/chat/decide", caller=OPERATOR, body={"promotes": False})
            assert back.status == 200, back.body
            assert (await ask(api, "POST", "/v1/services/chat/update", caller=ALONE, body=update("k3"))).status == 200
            scaled = await ask(api, "POST", "/v1/services/chat/scale", caller=OPERATOR, body={"replicas": 0})
            assert scaled.status == 200, scaled.body
            assert (await ask(api, "DELETE", "/v1/services/chat", caller=OPERATOR)).status == 200

    asyncio.run(scenario())


# --- a name that changes hands while a request is under way -------------------------------------------------------


Change = Callable[[], Awaitable[object]]


async def while_asked(agent: Agent, method: str, path: str, meanwhile: Change, body: Any = None) -> Answer:
    """What bob is answered, if something happens between the gate and the route."""

    async def happens() -> None:
        await meanwhile()

    app = FastAPI()
    Gate(agent, RULES).guard(app)
    app.router.dependencies.append(Depends(happens))
    answer_errors(app)
    handlers = handlers_of((agent.ray_clusters, agent.services))
    add_operations(app, [kind for kind in requests() if kind in handlers], handlers)
    add_service_routes(app, agent.services)
    handlers = handlers_of((agent.sweeps,))
    add_operations(app, handlers, handlers)
    return await ask(app, method, path, caller=BOB, body=body)


def test_a_ray_cluster_that_gets_the_name_later_is_not_given_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            clusters = agent.store.ray_clusters
            only = await clusters.add(ray("only", "bob"))

            async def another_is_the_only_one() -> None:
                await clusters.put(replace(only, state=ClusterState.ENDED))
                await clusters.add(ray("hers", "ann"))

            found = await while_asked(agent, "GET", "/v1/ray-clusters/-/access", another_is_the_only_one)
            assert (found.kind, b"token" in found.body) == ("not_found", False), found.body
            for method, path in (("GET", "/access"), ("DELETE", ""), ("POST", "/scale")):
                name = f"ray-{method.lower()}"
                await clusters.add(ray(name, "bob", ClusterState.ENDED))
                begins = partial(clusters.add, ray(name, "ann"))
                body = {"workers": 0} if method == "POST" else None
                found = await while_asked(agent, method, f"/v1/ray-clusters/{name}{path}", begins, body)
                assert (found.kind, b"token" in found.body) == ("not_found", False), found.body
                assert f"there is no Ray cluster {name}".encode() in found.body
            assert {one.state for one in await clusters.open()} == {ClusterState.ACTIVE}

    asyncio.run(scenario())


def test_a_service_that_gets_the_name_later_is_left_alone(tmp_path: Path) -> None:
    requests: tuple[tuple[str, str, Any], ...] = (
        ("POST", "/keys", {}),
        ("DELETE", "", None),
        ("POST", "/scale", {"replicas": 5}),
        ("GET", "", None),
    )

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            services = agent.store.services
            for number, (method, path, body) in enumerate(requests):
                name = f"chat-{number}"
                await services.add(service(f"bob-{number}", name, "bob", ServiceState.ENDED))
                hers = service(f"ann-{number}", name, "ann")
                begins = partial(services.add, hers)
                found = await while_asked(agent, method, f"/v1/services/{name}{path}", begins, body)
                assert found.kind == "not_allowed" or found.document["service"]["user"] == "bob", found.body
                assert b"secret" not in found.body
                assert name.encode() in found.body, "it is called by its name, not by its number"
                left = await services.find(name)
                assert left == replace(hers, id=left.id), (method, path)

    asyncio.run(scenario())


def test_a_sweep_that_gets_the_name_later_is_neither_seen_nor_stopped(tmp_path: Path) -> None:
    requests = (("GET", ""), ("GET", "/document"), ("POST", "/stop"))

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            sweeps = agent.store.sweeps
            for number, (method, path) in enumerate(requests):
                name = f"hunt-{number}"
                await sweeps.create(sweep(f"bob-{number}", name, "bob"))
                hers = sweep(f"ann-{number}", name, "ann", private=number == 0, document={**SPACE, "name": "hers"})
                found = await while_asked(agent, method, f"/v1/sweeps/{name}{path}", partial(sweeps.create, hers))
                assert found.status == 200, found.body
                assert "document" in found.document or found.document["sweep"]["user"] == "bob"
                assert b"hers" not in found.body
                assert (await sweeps.find(name, None)).state is SweepState.RUNNING

    asyncio.run(scenario())


# --- what others see of a sweep -----------------------------------------------------------------------------------


def test_values_in_the_document_of_a_sweep_are_for_its_user_alone(tmp_path: Path) -> None:
    options = {"mode": {"a": {"env": {"HF_TOKEN": "hush"}}, "b": {"env": {"HF_TOKEN": "hush too"}}}}
    index = "https://ann:hush@pypi.corp/simple"
    own = {"env": {"DATA": "hush"}, "options": options, "environment": {"index_url": index}, "nodes": 2}
    document = {**SPACE, "ugro": own}

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await agent.store.sweeps.create(sweep("k", "hunt", "ann", document=document))
            for caller in (BOB, VIEWER, OPERATOR, OWNER):
                found = await ask(api, "GET", "/v1/sweeps/hunt/document", caller=caller)
                assert b"hush" not in found.body
                shown = found.document["document"]
                assert shown["parameters"] == SPACE["parameters"]
                assert (shown["ugro"]["env"], shown["ugro"]["nodes"]) == ({"DATA": "***"}, 2)
            for caller in (ANN, ALONE):
                found = await ask(api, "GET", "/v1/sweeps/hunt/document", caller=caller)
                assert found.document["document"] == document

    asyncio.run(scenario())


def test_a_private_sweep_is_nobody_elses_by_any_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await agent.store.sweeps.create(sweep("k1", "hunt", "bob"))
            await agent.store.sweeps.create(sweep("k2", "secret-merger", "ann", private=True))
            await agent.store.sweeps.create(sweep("k3", "hunt", "ann", private=True))

            async def number(word: str, caller: Any) -> Any:
                found = await ask(api, "GET", f"/v1/sweeps/{word}", caller=caller)
                assert found.status == 200, found.body
                return found.document["sweep"]["id"]

            for caller in (BOB, VIEWER):
                for word in ("secret-merge", "secret-merger", "2", "3"):
                    found = await ask(api, "GET", f"/v1/sweeps/{word}", caller=caller)
                    assert found.kind == "not_found"
                    assert b"did you mean" not in found.body, found.body
                assert [await number(word, caller) for word in ("last", "hunt", "1")] == [1, 1, 1]
            for caller in (ANN, OPERATOR):
                assert [await number(word, caller) for word in ("last", "hunt", "1", "2")] == [3, 3, 1, 2]
            near = await ask(api, "GET", "/v1/sweeps/secret-merge", caller=ANN)
            assert b"did you mean secret-merger?" in near.body

    asyncio.run(scenario())


def test_private_sweeps_of_others_do_not_fill_up_a_list(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await agent.store.sweeps.create(sweep("k0", "of-bob", "bob"))
            for number in range(3):
                await agent.store.sweeps.create(sweep(f"k{number + 1}", "veiled", "ann", private=True))
            for caller, names in ((BOB, ["of-bob"]), (ANN, ["veiled", "veiled"])):
                found = (await ask(api, "GET", "/v1/sweeps?limit=2", caller=caller)).document["sweeps"]
                assert [one["name"] for one in found] == names, caller.user

    asyncio.run(scenario())


def test_the_best_of_a_sweep_counts_as_a_job_that_waits(tmp_path: Path) -> None:
    quotas = "quotas: {default: {queued_jobs: 1}}\n"
    space = {**SPACE, "metric": {"name": "loss", "goal": "minimize"}}

    async def scenario() -> None:
        async with running_agent(tmp_path, CLUSTER + quotas) as (agent, api):
            made = await agent.store.sweeps.create(sweep("k0", "mine", "ann", document=space))
            trial = await agent.store.sweeps.add(made.id, (("mode", '"a"'),), [])
            await agent.store.sweeps.put(made.id, replace(trial, state=TrialState.COMPLETE, best=1.0))

            async def between(scope: Scope, receive: Receive, send: Send) -> None:
                await api({**scope}, receive, send)

            async def launch(key: str) -> Answer:
                body = {"user": "", "key": key}
                recorded = AuditTrail(between, agent.audit, who)
                return await ask(recorded, "POST", "/v1/sweeps/mine/launch", caller=ANN, body=body)

            first = await launch("k1")
            assert first.status == 200, first.body
            await agent.audit.flush()
            [entry] = await agent.audit.newest(1, "", None)
            assert (entry.action, entry.subject) == ("launch best of sweep", f"1 → {first.document['job']['id']}")
            assert (await launch("k1")).document == first.document, "asked again, it is the same job"
            refused = await launch("k2")
            assert refused.kind == "not_allowed", refused.body
            assert b"queued_jobs" in refused.body

    asyncio.run(scenario())
