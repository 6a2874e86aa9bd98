"""``/services``: models behind an API, and one of them with its replicas and a box to try it.

Trying one is a POST that access control has checked as all others. It is for a dashboard on loopback only, and sends
one of a few requests that are made here (``views/trying.py``), never one that a browser has written.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Annotated, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from ugro.agent.api.app import http_status
from ugro.agent.api.responses import Body, LiveResponse, while_connected
from ugro.core.errors import NotAllowed, RemoteFailure, UgroError
from ugro.core.service import ServiceReport
from ugro.core.support.codec import dumps
from ugro.core.support.loopback import is_loopback
from ugro.web.node_http import Answer, post
from ugro.web.site import Site
from ugro.web.views.services import door_place
from ugro.web.views.trying import KINDS, Wish, problem_of, request_of

MOST_AT_ONCE = 16
_MOST_TEXT = 200_000
_MOST_PROBLEM = 16 * 1024
_EVENTS = "text/event-stream"
Text = Annotated[str, Field(max_length=_MOST_TEXT)]


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: Text


class TryBody(Body):
    kind: Literal["chat", "complete", "classify", "embed", "predict"]
    text: Text = ""
    messages: Annotated[list[Message], Field(max_length=200)] = Field(default_factory=list)
    image: Annotated[str, Field(max_length=1_900_000, pattern=r"^(data:image/[a-z+.-]+;base64,[A-Za-z0-9+/=]*)?$")] = ""
    max_tokens: Annotated[int, Field(ge=1, le=8192)] = 128
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    key: Annotated[str, Field(max_length=500, pattern=r"^[!-~]*$")] = ""  # of the service; never kept


def add_service_pages(app: FastAPI, site: Site) -> None:
    @app.get("/services")
    async def services(request: Request) -> Response:
        found = await site.agent.services.listed(everything=True)
        found.sort(key=lambda one: one.ended_at is not None)  # the newest first within each
        return await site.render(request, "services.html", cli="ugro serve ls", services=found)

    @app.get("/services/{word}")
    async def service(request: Request, word: str) -> Response:
        found = await site.agent.services.report(word)
        return await site.render(
            request,
            "service.html",
            cli=f"ugro serve status {found.name}",
            service=found,
            kinds=KINDS,
            has_tokens=any(one.figures.generated_tokens is not None for one in found.replicas),
            untried=_why_not(site, found),
        )

    _add_try(app, site)


class Slots:
    """How many requests of this kind are under way: a browser must not use up the agent's connections to nodes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    def take(self) -> None:
        if self._taken >= self._most:
            raise NotAllowed(f"{self._most} requests are under way", hint="wait until one of them has ended")
        self._taken += 1

    def give_back(self) -> None:
        self._taken -= 1


class TryResponse(LiveResponse):
    """What the service answers, as it arrives. The service learns when the browser leaves."""

    def __init__(self, answer: Answer, slots: Slots) -> None:
        super().__init__(_passed(answer), _EVENTS if answer.type == _EVENTS else "application/json")
        self._answer = answer
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._slots.give_back()


def _add_try(app: FastAPI, site: Site) -> None:
    slots = Slots(MOST_AT_ONCE)

    @app.post("/services/{word}/try")
    async def attempt(request: Request, word: str, body: TryBody) -> Response:
        try:
            return await while_connected(request, _tried(site, word, body, slots))
        except UgroError as error:
            return Response(dumps({"error": error.to_wire()}), http_status(error), media_type="application/json")


async def _tried(site: Site, word: str, body: TryBody, slots: Slots) -> Response:
    found = await site.agent.services.report(word)
    if reason := _why_not(site, found):
        raise NotAllowed(reason, hint=f"use its address: {found.url}")
    path, content = request_of(_wish(found, body))
    headers = {"content-type": "application/json"}
    if body.key:
        headers["authorization"] = f"Bearer {body.key}"
    slots.take()
    with ExitStack() as unless_answered:
        unless_answered.callback(slots.give_back)
        answer = await post(site.agent.tunnels, door_place(found), path, json.dumps(content).encode(), headers)
        if answer.status >= 300:
            raise RemoteFailure(problem_of(answer.status, await answer.text(_MOST_PROBLEM)), cause="refused")
        unless_answered.pop_all()
    return TryResponse(answer, slots)


def _wish(found: ServiceReport, body: TryBody) -> Wish:
    messages = [message.model_dump() for message in body.messages]
    return Wish(body.kind, found.model, body.text, messages, body.image, body.max_tokens, body.temperature)


def _why_not(site: Site, found: ServiceReport) -> str:
    """Why it cannot be tried here; empty if it can."""
    if not is_loopback(site.agent.cluster.config.dashboard.host):
        return "other machines reach this dashboard: models cannot be tried in it"
    if found.is_over:
        return f"service {found.name} is {found.state}"
    return "its connections are encrypted, for which this box has no certificate" if found.has_tls else ""


async def _passed(answer: Answer) -> AsyncGenerator[bytes]:
    """What was sent stays valid if the rest does not come: an error is the last event."""
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                yield piece
    except UgroError as error:
        yield f"\n\ndata: {dumps({'error': error.to_wire()})}\n\n".encode()
