"""Lets each request in, or not: the one place where roles are enforced, for every route.

What accepts connections (the socket, the HTTPS API, the dashboard) says in a request's scope who asks. The role is
checked before anything of the body is read: FastAPI would parse all of it first, for everybody. Whose the thing is that
the path names takes a look into the store, and is a dependency.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.access.caller import enter
from ugro.kernel.access.model import Caller
from ugro.kernel.access.service import Team
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.access_rules import Access, check_owner, check_role
from ugro.kernel.operations.audit_trail import Peer
from ugro.kernel.operations.door import CONNECTION
from ugro.kernel.operations.request import CALLER as CALLER
from ugro.kernel.operations.request import Kind
from ugro.kernel.operations.responses import BoundedRequest
from ugro.kernel.support.errors import NotAllowed

# --- streams end with the right to read them --------------------------------------------------------------------------
# A stream ends when its reader may not read it any more: a token ends, a role is lowered, a member leaves.


LOOKED_S = 1.0  # how often it is looked at, while something is sent


def while_allowed(send: Send, caller: Caller, now: Callable[[], Awaitable[Caller | None]]) -> Send:
    """``now``: who this is, and what they may do, at this moment; None: nothing any more."""
    is_over, looked_at = False, time.monotonic()

    async def sending(message: Message) -> None:
        nonlocal is_over, looked_at
        if is_over:
            return
        if message.get("more_body", False) and time.monotonic() - looked_at >= LOOKED_S:
            looked_at = time.monotonic()
            found = await now()
            is_over = found is None or not found.role.covers(caller.role)
        await send({"type": "http.response.body", "body": b"", "more_body": False} if is_over else message)

    return sending


# --- the gate ---------------------------------------------------------------------------------------------------------


_ACCESS = "ugro.access"  # in the scope of a request whose role was checked: the rule of its route
_ONLY = "-"  # in the place of a Ray cluster's name: the only one


class Gate:
    def __init__(self, agent: Agent, rules: Mapping[str, Access]) -> None:
        self._agent = agent
        self._rules = rules

    def guard(self, app: FastAPI) -> None:
        """All routes that are added to it from now on."""
        app.router.route_class = _guarded_by(self)
        app.router.dependencies.append(Depends(self.check))

    def admit(self, request: Request) -> None:
        """By the role alone, before the body is read. Raises NotAllowed."""
        caller: Caller | None = request.scope.get(CALLER)
        access = self._rules.get(f"{_method(request)} {_template(request.scope)}")
        request.scope[_ACCESS] = access
        if access is not None and access.role is None:
            return
        if caller is None:
            raise self._stranger(request.scope.get("client"))
        check_role(caller, access)
        enter(caller)

    def _stranger(self, client: object) -> NotAllowed:
        if isinstance(client, Peer) and self._agent.team.names.known(client.uid) is None:
            hint = "if there is such an account, the user database of that machine does not answer: try again soon"
            return NotAllowed(f"user id {client.uid} has no name on the agent's machine, and so no role", hint=hint)
        return NotAllowed("you may not use this agent", hint="its owner can add you to the team: see docs/team.md")

    async def check(self, request: Request) -> None:
        """Whose it is. Raises NotAllowed; NotFound for what the caller must not know of."""
        access: Access | None = request.scope[_ACCESS]
        caller: Caller | None = request.scope.get(CALLER)
        if access is not None and access.kind is not None and caller is not None and not caller.sees_all:
            await self._check_thing(caller, access, access.kind, request.path_params)

    async def _check_thing(self, caller: Caller, access: Access, kind: Kind, path: dict[str, Any]) -> None:
        key = next(name for name in ("word", "number", "name") if name in path)
        thing = await self._meant(kind, str(path[key]))
        # By its number from here on: in a moment, a word may mean another one, which is not the caller's.
        path[key] = thing.number if key == "number" else str(thing.number)
        check_owner(caller, access, thing.user, f"{kind} {thing.name}")

    async def _meant(self, kind: Kind, word: str) -> _Thing:
        """Among what the caller may see. Raises NotFound."""
        if kind is Kind.JOB:
            job = await self._agent.jobs.find(word)
            return _Thing(job.id, job.user, str(job.id))
        if kind is Kind.SWEEP:
            sweep = await self._agent.sweeps.find(word)
            return _Thing(sweep.id, sweep.user, sweep.name)
        if kind is Kind.SERVICE:
            service = await self._agent.store.services.find(word)
            return _Thing(service.id, service.user, service.name)
        cluster = await self._agent.ray_clusters.find(None if word == _ONLY else word)
        return _Thing(cluster.id, cluster.user, cluster.name)


@dataclass(frozen=True, slots=True)
class _Thing:
    """What a path names."""

    number: int
    user: str
    name: str


def _guarded_by(gate: Gate) -> type[APIRoute]:
    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def admitted(request: Request) -> Response:
                gate.admit(request)
                return await answer(BoundedRequest(request.scope, request.receive, request._send))

            return admitted

    return GuardedRoute


class SocketCallers:
    """Says who asks, of requests on a unix socket: by the process that opened the connection."""

    def __init__(self, app: ASGIApp, team: Team, *, is_of_team: bool = False) -> None:
        self._app = app
        self._team = team
        self._is_of_team = is_of_team

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(peer := scope.get("client"), Peer):
            now = partial(self._team.peer, peer.uid, peer[1], is_of_team=self._is_of_team)
            scope[CALLER] = caller = await now()
            if self._is_of_team:
                scope[CONNECTION].identify(caller.user if caller is not None else None)
            send = while_allowed(send, caller, now) if caller is not None else send
        await self._app(scope, receive, send)


def who(scope: Scope) -> tuple[str, str]:
    """For the audit log: the user, and by what."""
    caller: Caller | None = scope.get(CALLER)
    if caller is not None:
        return caller.user, caller.via
    client = scope.get("client")
    return "", f"{client[0]}" if client else "unknown"


def _method(request: Request) -> str:
    return "GET" if request.method == "HEAD" else request.method


def _template(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "")
