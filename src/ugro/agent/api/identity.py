"""The API's routes about who asks: their role, their tokens, and what the API is."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import Field

from ugro.agent.agent import Agent
from ugro.agent.api.gate import CALLER
from ugro.agent.api.openapi import described
from ugro.agent.api.responses import Body, json_response
from ugro.agent.ops.tokens import LONGEST_S
from ugro.core.identity import Caller, Role


class TokenBody(Body):
    role: Role
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_S)]
    name: Annotated[str, Field(max_length=64)] = ""


def add_identity_routes(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/whoami")
    async def whoami(request: Request) -> Response:
        """Who asks, with which role, and who runs the agent."""
        caller = _caller(request)
        return json_response({"user": caller.user, "role": caller.role, "owner": agent.team.owner})

    @app.get("/v1/openapi.json")
    async def openapi() -> Response:
        """This description."""
        return json_response(await asyncio.to_thread(described, app))

    @app.get("/v1/tokens")
    async def tokens(request: Request) -> Response:
        """One's own; for an admin, all."""
        return json_response({"tokens": agent.tokens.listed(_caller(request))})

    @app.post("/v1/tokens")
    async def create(request: Request, body: TokenBody) -> Response:
        """With the token itself, this once."""
        made, secret = await agent.tokens.create(_caller(request), body.role, body.expires_s, body.name)
        return json_response({"token": made, "secret": secret})

    @app.delete("/v1/tokens/{word}")
    async def revoke(request: Request, word: str) -> Response:
        """By number or name."""
        return json_response({"token": await agent.tokens.revoke(_caller(request), word)})


def _caller(request: Request) -> Caller:
    found: Caller = request.scope[CALLER]  # the gate has let it in
    return found
