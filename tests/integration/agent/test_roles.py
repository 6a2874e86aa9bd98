"""Every route states its role, and nobody gets in with less: without a token, or by one that does not suffice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from tests.rig.identity import CLUSTER, MEMBER, ask, bearer, person, running_agent, write_cluster
from ugro.agent.agent import Agent
from ugro.agent.api.access_rules import PAGES, RULES, Access
from ugro.agent.ops.tokens import Tokens
from ugro.core.cluster_file import ServedFile
from ugro.core.identity import Role
from ugro.core.support.state_dir import StateDir
from ugro.web.access import AccessSettings
from ugro.web.api_server import DOCS, create_api
from ugro.web.app import create_pages
from ugro.web.site import Site
from ugro.web.tokens import Tokens as DashboardTokens

_GAP = re.compile(r"\{[a-z]+(?::path)?\}")
_WEAKER = {Role.USER: Role.VIEWER, Role.OPERATOR: Role.USER, Role.ADMIN: Role.OPERATOR}


def stated(routes: Iterable[BaseRoute]) -> set[str]:
    named = [route for route in routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}" for route in named for method in route.methods or ()}


def address(route: str) -> tuple[str, str]:
    """Its method, and its path on the HTTPS API with something in the gaps."""
    method, _, path = route.partition(" ")
    return method, "/api" + _GAP.sub("1", path)


API_RULES: Mapping[str, Access] = {route: rule for route, rule in RULES.items() if " /v1/" in route}


def test_every_route_states_its_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert stated(api.routes) == set(RULES), "agent/api/access_rules.py states the role of each route"
            assert all(isinstance(route, APIRoute) for route in api.routes), "nothing is served beside the gate"

    asyncio.run(scenario())


def test_every_page_states_its_role(tmp_path: Path) -> None:
    site = Site(Agent(StateDir(tmp_path), ServedFile(None)))
    tokens = DashboardTokens(tmp_path / "token")
    app = create_pages(site, FastAPI(), AccessSettings(tokens, frozenset(), "c", lambda user, via: None))
    assert stated(app.routes) == set(PAGES), "agent/api/access_rules.py states the role of each page"


def test_nobody_gets_in_without_a_credential_that_suffices(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            app, admin = create_api(agent, api), person(MEMBER, Role.ADMIN)
            yesterday = Tokens(agent.store.tokens, lambda: datetime.now(UTC) - timedelta(days=1))
            _, expired = await yesterday.create(admin, Role.ADMIN, 3600, "expired")
            await agent.tokens.load()
            _, revoked = await agent.tokens.create(admin, Role.ADMIN, 3600, "revoked")
            await agent.tokens.revoke(admin, "revoked")
            _, foreign = await agent.tokens.create(person("nobody", Role.ADMIN), Role.ADMIN, 3600, "of-no-member")
            made = {role: (await agent.tokens.create(admin, role, 3600, str(role)))[1] for role in Role}
            admins = made[Role.ADMIN]
            bad = [{}, *(bearer(one) for one in ("", "ugro_nonsense", expired, revoked, foreign))]
            bad += [{"authorization": text} for text in ("Bearer", admins, f"Basic {admins}", f"Bearer x {admins}")]
            for route, rule in API_RULES.items():
                method, path = address(route)
                for credential in bad:
                    found = await ask(app, method, path, headers=credential)
                    assert (found.status, found.kind) == (401, "not_allowed"), (route, credential, found)
                if rule.role in _WEAKER:
                    found = await ask(app, method, path, headers=bearer(made[_WEAKER[rule.role]]))
                    assert (found.status, found.kind) == (403, "not_allowed"), (route, "weaker", found)
            assert (await ask(app, "GET", "/api/v1/whoami", headers=bearer(made[Role.VIEWER]))).document == {
                "user": MEMBER, "role": "viewer", "owner": agent.team.owner,
            }  # fmt: skip

    asyncio.run(scenario())


def test_a_token_never_exceeds_its_user(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            app = create_api(agent, api)
            _, secret = await agent.tokens.create(person(MEMBER, Role.ADMIN), Role.ADMIN, 3600, "all")

            async def role() -> object:
                found = await ask(app, "GET", "/api/v1/whoami", headers=bearer(secret))
                return found.document.get("role", found.kind)

            assert await role() == "admin"
            for path in ("POST /v1/tokens", "GET /v1/tokens", "POST /v1/dashboard", "PUT /v1/cluster"):
                method, where = address(path)
                found = await ask(app, method, where, headers=bearer(secret), body={})
                assert (found.status, found.kind) == (403, "not_allowed"), "a token makes no other way in"
            write_cluster(tmp_path, CLUSTER.replace("admin", "viewer"))
            await agent.cluster.look_again()
            assert await role() == "viewer"
            write_cluster(tmp_path, "nodes: {here: {transport: local}}\n")
            await agent.cluster.look_again()
            assert await role() == "not_allowed"

    asyncio.run(scenario())


def test_a_stream_ends_with_its_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            admin = person(MEMBER, Role.ADMIN)
            _, secret = await agent.tokens.create(admin, Role.ADMIN, 3600, "short")
            app = create_api(agent, api)
            following = asyncio.create_task(ask(app, "GET", "/api/v1/changes?after=0", headers=bearer(secret)))
            while agent.tokens.listed(admin)[0].last_used_at is None:  # it was let in then
                await asyncio.wait([following], timeout=0.01)
            await agent.tokens.revoke(admin, "short")
            while not following.done():
                await agent.store.jobs.note("test", "something to tell")
                await asyncio.wait([following], timeout=0.2)
            assert (await following).status == 200
            assert (await ask(app, "GET", "/api/v1/whoami", headers=bearer(secret))).status == 401

    asyncio.run(scenario())


def test_the_description_is_behind_the_gate_and_has_every_route(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, api):
            app = create_api(agent, api)
            _, secret = await agent.tokens.create(person(MEMBER, Role.ADMIN), Role.VIEWER, 3600, "docs")
            assert (await ask(app, "GET", DOCS)).status == 401
            document = (await ask(app, "GET", "/api/v1/openapi.json", headers=bearer(secret))).document
            described = {
                f"{method.upper()} {path.removeprefix('/api')}": operation["x-role"]
                for path, item in document["paths"].items() for method, operation in item.items()
            }  # fmt: skip
            plain = {route.replace(":path", ""): str(rule.role) for route, rule in API_RULES.items()}
            assert described == plain
            page = await ask(app, "GET", DOCS, headers=bearer(secret))
            assert page.status == 200
            assert b"/api/v1/jobs/{word}/cancel" in page.body
            assert b"<script" not in page.body
            assert b"://" not in page.body.replace(b"https://gpu", b""), "nothing from elsewhere"
            assert "default-src 'none'" in page.headers["content-security-policy"]

    asyncio.run(scenario())
