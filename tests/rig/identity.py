"""An agent in this process with a team, the roles of whose members tests choose, and requests to its applications."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.access.gate import CALLER
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.agent.agent import Agent
from ugro.kernel.agent.model import ServedFile
from ugro.kernel.operations.app import create_app
from ugro.kernel.support.state_dir import StateDir

_ANSWER_S = 60
MEMBER = "daemon"  # a user and a group that every Debian has; nobody logs in as it
CLUSTER = f"""\
nodes: {{here: {{transport: local}}}}
team: {{group: {MEMBER}, roles: {{{MEMBER}: admin}}}}
"""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str | None:
        """Of an error."""
        try:
            return str(json.loads(self.body)["error"]["kind"])
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@contextlib.asynccontextmanager
async def running_agent(folder: Path, cluster: str = CLUSTER) -> AsyncGenerator[tuple[Agent, FastAPI]]:
    """It knows and decides everything, and starts no job: its engine does not run."""
    agent = Agent(StateDir(folder / "home"), ServedFile(write_cluster(folder, cluster)))
    agent.home.path.mkdir(mode=0o700)
    await agent.start()
    try:
        yield agent, create_app(agent)
    finally:
        await agent.close()


def write_cluster(folder: Path, text: str) -> Path:
    """Its node keeps nothing outside the folder."""
    file = folder / "cluster.yaml"
    file.write_text(f"remote_root: {folder / 'grid'}\n{text}")
    return file


async def ask(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    caller: Caller | None = None,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> Answer:
    """One request and its whole answer, without a server."""
    all_headers = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    sent_headers = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    where, _, query = path.partition("?")
    scope: Scope = {
        "type": "http", "method": method, "path": where, "raw_path": where.encode(), "query_string": query.encode(),
        "headers": sent_headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http",
        "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"},
    }  # fmt: skip
    if caller is not None:
        scope[CALLER] = caller
    content = b"" if body is None else json.dumps(body).encode()
    sent: list[Message] = []
    given: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    is_answered = asyncio.Event()

    async def receive() -> Message:
        if given:
            return given.pop()
        await is_answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            is_answered.set()

    # As a server does: in a task of its own, which alone knows the caller.
    async with asyncio.timeout(_ANSWER_S):  # a stream that nobody should have got would not end
        await asyncio.create_task(_run(app, scope, receive, send), name=f"{method} {path}")
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def signed_in(cookie: str) -> dict[str, str]:
    """A browser, on a page of the dashboard itself."""
    return {"cookie": cookie, "origin": "http://localhost"}


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def person(user: str, role: Role, **more: bool) -> Caller:
    return Caller(user, role, "a test", **more)


async def nobody(user: str, via: str) -> Caller | None:
    """For a dashboard that nobody may use."""
    return None
