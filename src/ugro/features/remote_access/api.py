"""Clients on other machines: what they send of their files, and what they may not ask for.

Every request of such a client says so (``ugro-remote``). From then on no path in it is looked for on this machine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from pydantic import FailFast, Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ugro.features.remote_access.service import Uploads
from ugro.kernel.access.gate import CALLER
from ugro.kernel.access.model import Caller
from ugro.kernel.files.client_files import HEADER, KINDS, Item, Offers, remote_client, serving
from ugro.kernel.files.code.service import Code
from ugro.kernel.operations.responses import Body, json_response
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, UgroError, UsageError

UPLOAD_PATH = "/v1/remote/trees"
_MOST_TEXT = 1 << 20
_MOST_PATH = 8192
_MOST_IDS = 16 << 20
_MOST_KNOWN = 32
# Requests that name files of this machine, or end its agent.
_HERE_ONLY = {
    "PUT": re.compile(r"/v1/cluster(/file)?"),
    "POST": re.compile(r"/v1/agent/stop"),
    "GET": re.compile(r"/v1/cluster/file"),
}
StoreName = Literal["code", "folders"]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RemoteClients:
    """A middleware."""

    def __init__(self, app: ASGIApp, offers: Offers) -> None:
        self._app = app
        self._offers = offers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if header is None:
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope.get(CALLER)
        try:
            offer = self._offers.of(header, caller.user if caller is not None else "")
            _refuse(scope)
        except UgroError as error:
            status = 400 if isinstance(error, UsageError) else 403
            await Response(dumps({"error": error.to_wire()}), status, media_type="application/json")(
                scope, receive, send
            )
            return
        with serving(offer):
            await self._app(scope, receive, send)


def _refuse(scope: Scope) -> None:
    rule = _HERE_ONLY.get(scope["method"])
    if (rule is not None and rule.fullmatch(scope["path"])) or b"ssh_config=" in scope.get("query_string", b""):
        what = f"{scope['method']} {scope['path']}"
        raise NotAllowed(f"{what} is for clients on the master alone", hint="log in there: ssh MASTER")


class ItemBody(Body):
    what: str
    path: str = Field(max_length=_MOST_PATH)
    value: Any = None
    problem: str | None = Field(default=None, max_length=2000)


class ItemsBody(Body):
    items: Annotated[list[ItemBody], FailFast(), Field(max_length=100)]


class KnownBody(Body):
    store: StoreName
    root: Hex
    known: list[Hex] = Field(default_factory=list, max_length=_MOST_KNOWN)


def add_remote_routes(app: FastAPI, code: Code) -> None:
    def uploads(store: StoreName) -> Uploads:
        return code.uploads if store == "code" else code.folders.uploads

    @app.post("/v1/remote/items", status_code=204)
    async def offer(body: ItemsBody) -> None:
        """Files and folders for the request that has the same key."""
        _take(code.offers, body.items)

    @app.post("/v1/remote/known")
    async def known(body: KnownBody) -> Response:
        """Whether a tree is here, and the first of some others that is."""
        has, base = await uploads(body.store).known(body.root, body.known)
        return json_response({"has": has, "base": base})

    @app.post("/v1/remote/missing")
    async def missing(request: Request, store: StoreName) -> Response:
        """The body is hashes, one after the other; the answer has one bit for each."""
        bits = await uploads(store).missing(await _hashes(request))
        return json_response({"missing": base64.b64encode(bits).decode()})

    @app.post(UPLOAD_PATH)
    async def receive(request: Request, store: StoreName, root: str, bytes: Annotated[int, Query(ge=0)]) -> Response:
        """Contents that were missing."""
        return json_response(await uploads(store).receive(root, bytes, _pieces(request)))


def _take(offers: Offers, items: list[ItemBody]) -> None:
    found = remote_client()
    if found is None:
        raise UsageError(f"the header {HEADER} is missing")
    for item in items:
        if item.what not in KINDS or (isinstance(item.value, str) and len(item.value) > _MOST_TEXT):
            raise UsageError(f"{item.path[:200]}: cannot be taken")
        found.add(Item(item.what, item.path, item.value, item.problem))
    offers.keep(found)


async def _hashes(request: Request) -> bytes:
    ids = bytearray()
    async for piece in request.stream():
        ids += piece
        if len(ids) > _MOST_IDS:
            raise UsageError("too many hashes at once")
    return bytes(ids)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect as error:
        raise UgroError("the client left in the middle of an upload") from error
