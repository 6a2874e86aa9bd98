"""Every route states its role, and nobody gets in with less: without a token, or by one that does not suffice."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.rig.identity import (
    CLUSTER,
    MEMBER,
    Answer,
    ask,
    bearer,
    nobody,
    person,
    running_agent,
    signed_in,
    write_cluster,
)
from tests.rig.waiting import wait_until
from ugro.kernel.access.model import Role
from ugro.kernel.access.service import Tokens
from ugro.kernel.access.team_server import serve_team
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.access_rules import PAGES, RULES, Access
from ugro.kernel.operations.app import create_app
from ugro.web.access import COOKIE_LIFETIME_S, AccessSettings
from ugro.web.access import Tokens as DashboardTokens
from ugro.web.api_allowlist import is_allowed
from ugro.web.api_server import DOCS, create_api
from ugro.web.dashboard import create_pages, create_web
from ugro.web.site import Site

_GAP = re.compile(r"\{[a-z]+(?::path)?\}")
REFUSED = (403, "not_allowed")
_WEAKER = {Role.USER: Role.VIEWER, Role.OPERATOR: Role.USER, Role.ADMIN: Role.OPERATOR}


def stated(routes: Iterable[BaseRoute]) -> set[str]:
    named = [route for route in routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}" for route in named for method in route.methods or ()}


def request(route: str) -> tuple[str, str]:
    """Its method, and its path with something in the gaps."""
    method, _, path = route.partition(" ")
    return method, _GAP.sub("1", path)


def address(route: str) -> tuple[str, str]:
    """The same on the HTTPS API."""
    method, path = request(route)
    return method, "/api" + path


API_RULES: Mapping[str, Access] = {route: rule for route, rule in RULES.items() if " /v1/" in route}


def test_every_route_states_its_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            assert stated(api.routes) == set(RULES), "kernel/operations/access_rules.py states the role of each route"
            assert all(isinstance(route, APIRoute) for route in api.routes), "nothing is served beside the gate"

    asyncio.run(scenario())


def test_every_page_states_its_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            access = AccessSettings(DashboardTokens(tmp_path / "token"), frozenset(), "c", nobody)
            app = create_pages(Site(agent), FastAPI(), access)
            assert stated(app.routes) == set(PAGES), "kernel/operations/access_rules.py states the role of each page"

    asyncio.run(scenario())


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
            for route, rule in RULES.items():
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


def test_a_process_that_is_nobody_here_gets_in_nowhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (_, api):
            for route in RULES:
                found = await ask(api, *request(route))
                assert (found.status, found.kind) == REFUSED, (route, found)
                assert b"you may not use this agent" in found.body, route

    asyncio.run(scenario())


# --- the dashboard -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def dashboard(folder: Path) -> AsyncGenerator[tuple[Agent, ASGIApp, DashboardTokens]]:
    async with running_agent(folder) as (agent, api):
        tokens = DashboardTokens(folder / "token")
        yield agent, create_web(agent, api, AccessSettings(tokens, frozenset(), "c", agent.team.browser)), tokens


async def give(agent: Agent, folder: Path, role: Role, cluster: str = CLUSTER) -> None:
    """The member has this role from now on."""
    write_cluster(folder, cluster.replace("admin", role))
    await agent.cluster.look_again()


def test_a_browser_that_is_not_signed_in_gets_no_page(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with dashboard(tmp_path) as (_, app, tokens):
            sessions, now = tokens.sessions, time.time()
            cookies = {"signed out": sessions.begin(now, MEMBER), "of no member": sessions.begin(now, "bin")}
            owner = sessions.begin(now)
            # The last to begin: each new session drops those that have run out.
            cookies |= {"wrong": "nonsense", "expired": sessions.begin(now - COOKIE_LIFETIME_S - 1)}
            sessions.end(sessions.find(cookies["signed out"], now) or "")
            bad: dict[str, dict[str, str]] = {name: {"cookie": f"c={cookie}"} for name, cookie in cookies.items()}
            bad |= {"no cookie": {}, "wrong token": bearer("nonsense"), "no token": bearer("")}
            sign_in = (await ask(app, "GET", "/nope")).body
            for route in (*PAGES, *RULES):
                for name, headers in bad.items():
                    found = await ask(app, *request(route), headers={"origin": "http://localhost", **headers})
                    assert (found.status, found.body) == (401, sign_in), (route, name, found)
            for path in ("/", "/metrics"):
                assert (await ask(app, "GET", path, headers=signed_in(f"c={owner}"))).status == 200, path

    asyncio.run(scenario())


def test_a_browser_with_a_weaker_role_gets_nothing_that_needs_more(tmp_path: Path) -> None:
    # All others are refused to every browser, whatever its role.
    of_browsers = {route: rule for route, rule in RULES.items() if is_allowed(*request(route))}

    async def scenario() -> None:
        async with dashboard(tmp_path) as (agent, app, tokens):
            member = signed_in(f"c={tokens.sessions.begin(time.time(), MEMBER)}")
            for needed, weaker in _WEAKER.items():
                await give(agent, tmp_path, weaker)
                for route in needing(needed, {**PAGES, **of_browsers}):
                    found = await ask(app, *request(route), headers=member)
                    assert found.status == 403, (route, weaker, found)
                    assert f"needs the role {needed}".encode() in found.body, (route, weaker, found)

    asyncio.run(scenario())


def needing(role: Role, rules: Mapping[str, Access]) -> list[str]:
    return [route for route, rule in rules.items() if rule.role is role]


# --- the team's socket ---------------------------------------------------------------------------------------------

_CURL = shutil.which("curl")
_THEN, _ENDS = "\x1e", "\x1f"  # before and after the status, which follows its answer


@pytest.fixture
def place() -> Iterator[Path]:
    """That others can get to, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="roles-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def serving_team(folder: Path, cluster: str, socket: Path) -> AsyncGenerator[Agent]:
    async with running_agent(folder, cluster) as (agent, api):
        serving = asyncio.create_task(serve_team(agent, api))
        try:
            await asyncio.to_thread(wait_until, socket.exists, 30, "the team's socket")
            yield agent
        finally:
            agent.stopping.set()
            await serving


async def ask_socket(socket: Path, user: str, routes: Collection[str]) -> dict[str, Answer]:
    """One after the other, in a process of this user; the status is 0 where there is no way in."""
    assert _CURL is not None
    command: list[str] = []
    for route in routes:
        method, path = request(route)
        command += ["--next", "-s", "--max-time", "20", "--unix-socket", str(socket), "-X", method]
        command += ["-H", "content-type: application/json", *(() if method == "GET" else ("-d", "{}"))]
        command += ["-w", f"{_THEN}%{{http_code}}{_ENDS}", f"http://agent{path}"]

    def run() -> bytes:
        started = [str(_CURL), *command[1:]]
        return subprocess.run(
            started, capture_output=True, user=user, group=user, extra_groups=[], timeout=120, cwd="/"
        ).stdout

    texts = (await asyncio.to_thread(run)).split(_ENDS.encode())[:-1]
    parts = [text.rpartition(_THEN.encode()) for text in texts]
    return {route: Answer(int(status), {}, body) for route, (body, _, status) in zip(routes, parts, strict=True)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
@pytest.mark.skipif(_CURL is None, reason="curl asks as another user, and is not installed")
def test_a_member_with_a_weaker_role_gets_nothing_that_needs_more(place: Path) -> None:
    socket = place / "team" / "agent.sock"
    cluster = CLUSTER.replace("roles:", f"socket: {socket}, roles:")

    async def scenario() -> None:
        async with serving_team(place, cluster, socket) as agent:
            for needed, weaker in _WEAKER.items():
                await give(agent, place, weaker, cluster)
                found = await ask_socket(socket, MEMBER, needing(needed, RULES))
                in_anyway = {route: one for route, one in found.items() if (one.status, one.kind) != REFUSED}
                assert found
                assert not in_anyway, weaker
                # So much that the member is known, and asked for something that exists.
                may = await ask_socket(socket, MEMBER, ["GET /v1/whoami", "GET /metrics"])
                assert may["GET /v1/whoami"].document["role"] == weaker
                assert may["GET /metrics"].status == 200
            await give(agent, place, Role.ADMIN, cluster)
            files = [route for route, rule in RULES.items() if rule.needs_files]
            for route, one in (await ask_socket(socket, MEMBER, files)).items():
                assert (one.status, one.kind) == REFUSED, (route, one)
            strangers = await ask_socket(socket, "bin", list(RULES))
            assert {one.status for one in strangers.values()} == {0}, "the kernel lets no others open it"

    asyncio.run(scenario())


# --- tokens --------------------------------------------------------------------------------------------------------


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


def announcing(app: ASGIApp, is_answered: asyncio.Event) -> ASGIApp:
    """The same; the event is set when an answer begins."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            is_answered.set()
            await send(message)

        await app(scope, receive, sending)

    return run


@pytest.mark.parametrize("becomes", [CLUSTER.replace("admin", "viewer"), "nodes: {here: {transport: local}}\n"])
@pytest.mark.parametrize("is_browser", [False, True])
def test_a_stream_ends_when_its_user_loses_the_role_it_was_opened_with(
    tmp_path: Path, is_browser: bool, becomes: str
) -> None:
    async def scenario() -> None:
        async with dashboard(tmp_path) as (agent, app, tokens):
            if is_browser:
                path, headers = "/live", signed_in(f"c={tokens.sessions.begin(time.time(), MEMBER)}")
            else:
                _, secret = await agent.tokens.create(person(MEMBER, Role.ADMIN), Role.ADMIN, 3600, "t")
                app, path, headers = create_api(agent, create_app(agent)), "/api/v1/changes?after=0", bearer(secret)
            is_open = asyncio.Event()
            following = asyncio.create_task(ask(announcing(app, is_open), "GET", path, headers=headers))
            await is_open.wait()
            write_cluster(tmp_path, becomes)
            await agent.cluster.look_again()
            while not following.done():
                await agent.store.jobs.note("test", "something to tell")
                await asyncio.wait([following], timeout=0.2)
            assert (await following).status == 200

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
