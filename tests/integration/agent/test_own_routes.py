"""Every route and page that names a thing: it is changed by its user alone, and a private one is nobody else's to see.

Built from the tables of routes: one that is added is tried here, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from tests.integration.agent.test_own_jobs import submitted
from tests.rig.identity import CLUSTER, MEMBER, Answer, ask, person, running_agent, signed_in
from ugro.features.ray.model import ClusterWish, Head, RayCluster
from ugro.features.services.model import DoorPlace, Revision, Service, ServiceSpec
from ugro.features.sweeps.model import Budget
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.agent.agent import Agent
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.operations.access_rules import PAGES, RULES, Access
from ugro.kernel.operations.request import Kind
from ugro.kernel.support.codec import dumps
from ugro.web.access import AccessSettings
from ugro.web.access import Tokens as DashboardTokens
from ugro.web.dashboard import create_web

ANN, BOB = person("ann", Role.USER), person("bob", Role.USER)
VIEWER, OPERATOR = person("eve", Role.VIEWER), person("olga", Role.OPERATOR)
_GAP = re.compile(r"\{(?:word|number|name)(?::path)?\}")
_OTHER_GAP = re.compile(r"\{[a-z]+(?::path)?\}")
# Ann's, by number and by other words. The second job and the second sweep are private; services never are.
OPEN: Mapping[Kind, tuple[str, ...]] = {
    Kind.JOB: ("1", "theirs"),
    Kind.SWEEP: ("1", "search"),
    Kind.SERVICE: ("chat",),
    Kind.RAY_CLUSTER: ("ray", "-"),
}
PRIVATE: Mapping[Kind, tuple[str, ...]] = {Kind.JOB: ("2", "secret"), Kind.SWEEP: ("2", "veiled")}


async def make_things(agent: Agent, api: FastAPI) -> None:
    await submitted(api, ANN, "theirs")
    await submitted(api, ANN, "secret", private=True)
    spec = JobSpec("chat", ("serve",))
    await agent.store.sweeps.create(NewSweep("k1", "search", "ann", "{}", dumps(spec), Budget()))
    await agent.store.sweeps.create(NewSweep("k2", "veiled", "ann", "{}", dumps(replace(spec, private=True)), Budget()))
    door, revision = DoorPlace("here", "python3", "127.0.0.1"), Revision(1, spec, "a test")
    await agent.store.services.add(Service(0, "k", "ann", ServiceSpec("chat"), door, 1, 1, (revision,), "s"))
    head = Head("here", "/bin/python", "10.0.0.1", 6379, 8265, "/nowhere")
    await agent.store.ray_clusters.add(RayCluster(0, "k", "ann", ClusterWish(name="ray"), head, "hush"))


def requests(rules: Mapping[str, Access], things: Mapping[Kind, tuple[str, ...]]) -> list[tuple[Access, str, str]]:
    """For each route that names a thing of such a kind, by each of its words."""
    found: list[tuple[Access, str, str]] = []
    for route, rule in rules.items():
        method, _, path = route.partition(" ")
        for word in things.get(rule.kind, ()) if rule.kind is not None else ():
            if word.isdigit() or "{number}" not in path:
                found.append((rule, method, _OTHER_GAP.sub("k", _GAP.sub(word, path))))
    return found


def test_the_table_says_of_each_route_whether_it_names_a_thing() -> None:
    """Otherwise none of this would be tried with it."""
    named = re.compile(r" (/v1)?/(jobs|sweeps|services|ray-clusters)/\{")
    rules = {**RULES, **PAGES}
    assert [route for route, rule in rules.items() if named.search(route) and rule.kind is None] == []
    readers = ("GET", "POST /v1/jobs/{word}/results/content")
    not_own = [route for route, rule in rules.items() if rule.kind is not None and not rule.is_own]
    assert [route for route in not_own if not route.startswith(readers)] == []


def test_nobody_changes_what_is_anothers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await make_things(agent, api)
            before = await recorded(agent)
            tried = [one for one in requests(RULES, OPEN) if one[0].is_own]
            assert {one[0].kind for one in tried} == set(Kind)
            for _, method, path in tried:
                for caller in (BOB, VIEWER):
                    found = await ask(api, method, path, caller=caller, body={})
                    assert found.kind == "not_allowed", (method, path, caller, found.body)
                    assert b"hush" not in found.body
                assert b"is ann's" in (await ask(api, method, path, caller=BOB, body={})).body, (method, path)
            assert await recorded(agent) == before
            assert b"hush" in (await ask(api, "GET", "/v1/ray-clusters/ray/access", caller=ANN)).body
            assert await agent.audit.newest(10, "", None) == [], "it is her own"
            assert b"hush" in (await ask(api, "GET", "/v1/ray-clusters/ray/access", caller=OPERATOR)).body
            [read] = await agent.audit.newest(10, "", None)
            assert (read.user, read.action, read.subject) == ("olga", "read token of Ray cluster", "ray of ann")

    asyncio.run(scenario())


async def recorded(agent: Agent) -> list[object]:
    jobs = [await agent.store.jobs.get(number) for number in (1, 2)]
    things = [await agent.store.sweeps.newest(9), await agent.store.services.newest(9)]
    return [*jobs, *things, await agent.ray_clusters.find("ray")]


def test_a_private_thing_is_nowhere_for_others(tmp_path: Path) -> None:
    async def asked(api: FastAPI, caller: Caller, method: str, path: str) -> Answer:
        return await ask(api, method, path, caller=caller, body=None if method == "GET" else {})

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            await make_things(agent, api)
            for rule, method, path in requests(RULES, PRIVATE):
                for caller in (BOB, VIEWER):
                    if rule.role is not None and caller.role.covers(rule.role):
                        found = await asked(api, caller, method, path)
                        assert found.kind == "not_found", (method, path, caller, found.body)
            for path in ("/v1/jobs/2", "/v1/jobs/secret", "/v1/sweeps/veiled/document"):
                for caller in (ANN, OPERATOR):
                    assert (await asked(api, caller, "GET", path)).status == 200, (path, caller)

    asyncio.run(scenario())


def test_pages_of_private_things_are_nowhere_and_those_of_others_change_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path, CLUSTER.replace("admin", "user")) as (agent, api):
            await make_things(agent, api)
            tokens = DashboardTokens(tmp_path / "token")
            app = create_web(agent, api, AccessSettings(tokens, frozenset(), "c", agent.team.browser))
            member = signed_in(f"c={tokens.sessions.begin(time.time(), MEMBER)}")
            for _, method, path in requests(PAGES, PRIVATE):
                found = await ask(app, method, path, headers=member, body=None if method == "GET" else {})
                assert found.status == 404, (method, path, found.body)
                assert "secret" in path or b"secret" not in found.body, (method, path, found.body)
            for rule, method, path in requests(PAGES, OPEN):
                if rule.is_own:
                    found = await ask(app, method, path, headers=member, body=None if method == "GET" else {})
                    assert found.status == 403, (method, path, found.body)
                    assert b"is ann" in found.body, (method, path, found.body)

    asyncio.run(scenario())
