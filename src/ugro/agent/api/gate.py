"""Lets each request in, or not: the one place where roles are enforced, for every route.

What accepts connections (the socket, the HTTPS API, the dashboard) says in a request's scope who asks. The role is
checked before anything of the body is read: FastAPI would parse all of it first, for everybody. Whose the thing is that
the path names takes a look into the store, and is a dependency.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ugro.agent.agent import Agent
from ugro.agent.api.access_rules import Access, Kind, check_owner, check_role
from ugro.agent.api.audit_trail import Peer
from ugro.agent.door import CONNECTION
from ugro.agent.ops.team import Team
from ugro.agent.support.caller import enter
from ugro.core.errors import NotAllowed, NotFound
from ugro.core.identity import Caller

CALLER = "ugro.caller"  # in a request's scope: who asks; None is a stranger
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
            raise stranger()
        check_role(caller, access)
        enter(caller)

    async def check(self, request: Request) -> None:
        """Whose it is. Raises NotAllowed; NotFound for what the caller must not know of."""
        access: Access | None = request.scope[_ACCESS]
        caller: Caller | None = request.scope.get(CALLER)
        if access is not None and access.kind is not None and caller is not None and not caller.sees_all:
            await self._check_thing(caller, access, access.kind, request.path_params)

    async def _check_thing(self, caller: Caller, access: Access, kind: Kind, path: dict[str, Any]) -> None:
        key = next(name for name in ("word", "number", "name") if name in path)
        word = str(path[key])
        if kind is Kind.JOB:
            job = await self._agent.jobs.find(word)
            # By its number from here on: a word may mean another job, which the caller must not see, in a moment.
            path[key] = str(job.id) if key != "number" else job.id
            check_owner(caller, access, job.user, f"job {job.id}")
            return
        owner, is_private = await self._owner(kind, word)
        if not caller.may_see(owner, is_private=is_private):
            raise NotFound(f"there is no {kind} {word!r:.80}")
        check_owner(caller, access, owner, f"{kind} {word}")

    async def _owner(self, kind: Kind, word: str) -> tuple[str, bool]:
        store = self._agent.store
        if kind is Kind.SWEEP:
            sweep = await store.sweeps.find(word)
            return sweep.user, is_private(sweep.spec)
        if kind is Kind.SERVICE:
            return (await store.services.find(word)).user, False
        return (await self._agent.ray_clusters.get(None if word == _ONLY else word)).user, False


def _guarded_by(gate: Gate) -> type[APIRoute]:
    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def admitted(request: Request) -> Response:
                gate.admit(request)
                return await answer(request)

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
            scope[CALLER] = caller = self._team.peer(peer.uid, peer[1], is_of_team=self._is_of_team)
            if self._is_of_team:
                scope[CONNECTION].identify(is_known=caller is not None)
        await self._app(scope, receive, send)


def who(scope: Scope) -> tuple[str, str]:
    """For the audit log: the user, and by what."""
    caller: Caller | None = scope.get(CALLER)
    if caller is not None:
        return caller.user, caller.via
    client = scope.get("client")
    return "", f"{client[0]}" if client else "unknown"


def stranger() -> NotAllowed:
    return NotAllowed("you may not use this agent", hint="its owner can add you to the team: see docs/team.md")


def is_private(spec: str) -> bool:
    """Of a sweep: its jobs' spec, as JSON."""
    return bool(json.loads(spec).get("private", False))


def _method(request: Request) -> str:
    return "GET" if request.method == "HEAD" else request.method


def _template(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "")
