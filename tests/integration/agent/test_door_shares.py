"""What one user can take of the HTTPS API and the dashboard, and say about themselves. Real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from tests.rig.identity import CLUSTER, MEMBER, bearer, person, running_agent, signed_in
from ugro.kernel.access.model import Role
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.door import Door, DoorLimits
from ugro.web.access import AccessSettings
from ugro.web.access import Tokens as DashboardTokens
from ugro.web.api_server import create_api, listen, make_server
from ugro.web.dashboard import create_web

FEW = DoorLimits(of_one_user=3)
_ANSWER_S = 30
Opened = Callable[[Agent, FastAPI, Path], Awaitable[tuple[ASGIApp, str, list[dict[str, str]]]]]


async def status_of(port: int, path: str, headers: Mapping[str, str]) -> tuple[int, asyncio.StreamWriter]:
    """Of one request on a connection of its own, of whose answer only the first line is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join((*lines, "", "")).encode())
    async with asyncio.timeout(_ANSWER_S):
        first = await reader.readline()
    return int(first.split()[1]), writer


async def https_api(agent: Agent, api: FastAPI, folder: Path) -> tuple[ASGIApp, str, list[dict[str, str]]]:
    """The application, a stream of it, and two users."""
    callers = [person(MEMBER, Role.VIEWER), person(agent.team.owner, Role.ADMIN)]
    secrets = [(await agent.tokens.create(one, Role.VIEWER, 600, "t"))[1] for one in callers]
    return create_api(agent, api), "/api/v1/changes?after=0", [bearer(secret) for secret in secrets]


async def dashboard(agent: Agent, api: FastAPI, folder: Path) -> tuple[ASGIApp, str, list[dict[str, str]]]:
    tokens = DashboardTokens(folder / "token")
    app = create_web(agent, api, AccessSettings(tokens, frozenset(), "c", agent.team.browser))
    return app, "/live", [signed_in(f"c={tokens.sessions.begin(time.time(), user)}") for user in (MEMBER, "")]


Scenario = Callable[[int, Agent, str, list[dict[str, str]]], Awaitable[None]]


def with_door(folder: Path, opened_by: Opened, scenario: Scenario) -> None:
    """``scenario`` gets the port, a stream's path, and what a member and the owner send to show who they are."""

    async def serve(agent: Agent, api: FastAPI) -> None:
        app, stream, users = await opened_by(agent, api, folder)
        with listen("127.0.0.1", 0, may_move=False) as listener:
            door = asyncio.create_task(Door(make_server(app, None, None), FEW).serve(listener))
            await scenario(listener.getsockname()[1], agent, stream, users)
            door.cancel()

    async def main() -> None:
        async with running_agent(folder, CLUSTER) as (agent, api), asyncio.timeout(2 * _ANSWER_S):
            await serve(agent, api)

    asyncio.run(main())


@pytest.mark.parametrize("opened_by", [https_api, dashboard])
def test_one_user_does_not_shut_out_the_others(tmp_path: Path, opened_by: Opened) -> None:
    async def scenario(port: int, agent: Agent, stream: str, users: list[dict[str, str]]) -> None:
        member, owner = users
        opened = [await status_of(port, stream, member) for _ in range(4)]
        assert [status for status, _ in opened] == [200, 200, 200, 503]
        opened.append(await status_of(port, stream, owner))
        assert opened[-1][0] == 200, "others have theirs"
        opened[0][1].close()
        while (again := await status_of(port, stream, member))[0] == 503:  # until the agent has seen that it left
            opened.append(again)
        for _, writer in (*opened, again):
            writer.close()

    with_door(tmp_path, opened_by, scenario)


def test_nobody_says_which_address_they_come_from(tmp_path: Path) -> None:
    async def scenario(port: int, agent: Agent, stream: str, users: list[dict[str, str]]) -> None:
        claims = {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "https"}
        status, writer = await status_of(port, "/api/v1/whoami", {**users[0], **claims})
        writer.close()
        assert status == 200
        [used] = [one for one in agent.tokens.listed(person("root", Role.ADMIN)) if one.user == MEMBER]
        assert used.last_used_by == "127.0.0.1"

    with_door(tmp_path, https_api, scenario)
