"""The HTTPS API for programs elsewhere: the routes of the agent's socket below ``/api``, for those who have a token.

Off by default. Beyond loopback it opens only with TLS, and while there is a valid token: an open port that nobody can
use is only a risk. A program that is refused learns nothing but that.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import hashlib
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.access.config import Api
from ugro.kernel.access.gate import CALLER, while_allowed, who
from ugro.kernel.access.model import ApiToken, AuditEntry, Caller, is_loopback
from ugro.kernel.agent.agent import Agent
from ugro.kernel.operations.app import Server
from ugro.kernel.operations.audit_trail import REFUSED, AuditTrail, now
from ugro.kernel.operations.door import CONNECTION, BodyLimit, Door
from ugro.kernel.operations.openapi import PREFIX, described
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.kernel.support.moments import boot_clock_s
from ugro.web.access import LARGEST_BODY

# --- api docs ---------------------------------------------------------------------------------------------------------
# The page that describes the HTTPS API, for people: made here from its OpenAPI document, without scripts.


_TEMPLATES = Path(__file__).parent / "templates"
_STYLE = (_TEMPLATES / "api_docs.css").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; frame-ancestors 'none'; base-uri 'none'"


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    role: str
    text: str
    parameters: tuple[Field, ...]
    body: tuple[Field, ...]


def docs_page(document: Mapping[str, Any]) -> str:
    groups: dict[str, list[Operation]] = {}
    for operation in operations(document):
        groups.setdefault(operation.path.split("/")[3], []).append(operation)
    about = {"title": document["info"]["title"], "version": document["info"]["version"]}
    return _template().render(style=_STYLE, groups=groups, description=document["info"]["description"], **about)


def operations(document: Mapping[str, Any]) -> Iterator[Operation]:
    schemas = document.get("components", {}).get("schemas", {})
    for path, item in sorted(document["paths"].items()):
        for method, found in item.items():
            parameters = tuple(
                Field(one["name"], _kind(one.get("schema", {})), bool(one.get("required")))
                for one in found.get("parameters", ())
            )
            body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            text = found.get("description") or found.get("summary", "")
            yield Operation(method.upper(), path, found["x-role"], text, parameters, tuple(_fields(body, schemas)))


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Field]:
    if "$ref" in schema:
        schema = schemas.get(_name(schema), {})
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        yield Field(name, _kind(one), name in required)


def _kind(schema: Mapping[str, Any]) -> str:
    """``string``, ``list of integer``, ``Submit or null``."""
    if "$ref" in schema:
        return _name(schema)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if ways := schema.get("anyOf"):
        return " or ".join(_kind(one) for one in ways)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("api_docs.html")


# --- listening --------------------------------------------------------------------------------------------------------
# What the dashboard and the HTTPS API share: a listener, a certificate that is tried first, and a server.


log = logging.getLogger(__name__)

POLL_S = 0.5  # how soon a change of settings is noticed
_SHUTDOWN_GRACE_S = 1
_BACKLOG = 1024  # a client must not wait because a crowd came before it
_LONGEST_HEAD = 32 * 1024


def make_server(app: ASGIApp, certificate_file: str | None, key_file: str | None) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=_LONGEST_HEAD,
            ws="none",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            server_header=False,
            proxy_headers=False,  # else a process on this machine says which address it comes from
            access_log=False,  # its lines would contain sign-in links
            ssl_certfile=certificate_file,
            ssl_keyfile=key_file,
            reset_contextvars=True,  # a request must not inherit the caller of the one before it on its connection
        )
    )


def try_certificate(certificate_file: str | None, key_file: str | None) -> None:
    """Loads the certificate before the server does, so that a missing file is reported."""
    if certificate_file is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate_file, key_file)


def listen(host: str, port: int, *, may_move: bool) -> socket.socket:
    """``may_move``: to another port, if this one is taken."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not may_move:
                raise
            # Another agent, of this user or another, has the port. `ugro dashboard` prints the one in use.
            listener.bind((address[0], 0))
            log.info("port %s is in use; the dashboard uses another", port)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


# --- api server -------------------------------------------------------------------------------------------------------


DOCS = f"{PREFIX}/v1/docs"
DESCRIPTION = f"{PREFIX}/v1/openapi.json"
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


async def serve_api(agent: Agent, api: FastAPI) -> None:
    """Serves until the agent stops, opens again after a change of settings, and says why it does not."""
    while not agent.stopping.is_set():
        settings = agent.cluster.config.api
        problem = None
        if settings.bind is not None:
            serving = asyncio.create_task(_serve(agent, api, settings), name="HTTPS API")
            try:
                await asyncio.wait([serving])
            finally:
                serving.cancel()
            problem = serving.exception()
        agent.api_address.closed(_as_error(problem) if problem is not None else None)
        if problem is not None or settings.bind is None:
            await _until_changed(agent, settings, may_open=why_closed(agent, settings) is None)


def why_closed(agent: Agent, settings: Api) -> NotAllowed | None:
    """Why these settings open nothing."""
    if settings.bind is None or is_loopback(settings.bind[0]):
        return None
    if settings.tls is None:
        hint = "set api.tls.cert and api.tls.key in the cluster file, or bind to 127.0.0.1"
        return NotAllowed("the HTTPS API does not open beyond loopback without TLS", hint=hint)
    if not agent.tokens.has_valid:
        hint = "create one first: ugro token create --role viewer --expires 30d"
        return NotAllowed("the HTTPS API does not open beyond loopback while there is no valid token", hint=hint)
    return None


def _as_error(problem: BaseException) -> UgroError:
    if isinstance(problem, UgroError):
        log.warning("HTTPS API not available: %s", problem)
        return problem
    log.error("the HTTPS API failed", exc_info=problem)
    return UgroError("the HTTPS API failed", hint="see: ugro agent logs")


async def _serve(agent: Agent, api: FastAPI, settings: Api) -> None:
    assert settings.bind is not None
    if (problem := why_closed(agent, settings)) is not None:
        raise problem
    host, port = settings.bind
    files = (settings.tls.cert, settings.tls.key_) if settings.tls is not None else (None, None)
    try:
        try_certificate(*files)
    except OSError as error:
        text = f"cannot open the HTTPS API: its certificate cannot be used: {error.strerror or error}"
        raise NotAllowed(text, hint=f"see api.tls in the cluster file: cert {files[0]}, key {files[1]}") from error
    try:
        listener = listen(host, port, may_move=False)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotAllowed(f"cannot open the HTTPS API: {reason}", hint="see api in the cluster file") from error
    with listener:
        server = make_server(create_api(agent, api), *files)
        scheme = "https" if settings.tls else "http"
        shown = f"[{host}]" if ":" in host else host
        agent.api_address.opened(f"{scheme}://{shown}:{listener.getsockname()[1]}{PREFIX}/v1")
        log.info("HTTPS API at %s", agent.api_address.url)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([]), name="serve the HTTPS API")
            accepting = group.create_task(Door(server, what="the HTTPS API").serve(listener), name="the API's door")
            await _until_changed(agent, settings, may_open=True)
            accepting.cancel()
            server.should_exit = True


async def _until_changed(agent: Agent, settings: Api, *, may_open: bool) -> None:
    def is_same() -> bool:
        return agent.cluster.config.api == settings and (why_closed(agent, settings) is None) == may_open

    while is_same() and not agent.stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(agent.stopping.wait(), POLL_S)


def create_api(agent: Agent, api: ASGIApp) -> ASGIApp:
    hint = "submit fewer jobs at once, and put data into files"
    bounded = BodyLimit(api, most_bytes=LARGEST_BODY, hint=hint)
    return TokenGate(AuditTrail(bounded, agent.audit, who), agent, api)


class TokenGate:
    """Only requests with a valid token reach the application, which then checks the role."""

    def __init__(self, app: ASGIApp, agent: Agent, api: ASGIApp) -> None:
        self._app = app
        self._agent = agent
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        guarded = _with_headers(send)
        token, caller = await self._caller(scope)
        connection = scope.get(CONNECTION)
        if connection is not None and not connection.identify(caller.user if caller is not None else None):
            crowded = NotAllowed("you have too many connections open", hint="close some, or try again later")
            await _error(crowded, 503, {"connection": "close"})(scope, receive, guarded)
            return
        if token is None or caller is None:
            await self._refuse(scope)(scope, receive, guarded)
            return
        scope[CALLER] = caller
        path: str = scope["path"]
        if path == DOCS and scope["method"] in ("GET", "HEAD"):
            await (await self._docs())(scope, receive, guarded)
        elif not path.startswith(f"{PREFIX}/v1/"):
            error = NotFound("no such address", hint=f"the API is below {PREFIX}/v1/, and described at {DOCS}")
            await _error(error, 404)(scope, receive, guarded)
        else:
            now = partial(self._now, token, _address(scope))
            await self._app(_inner(scope), receive, while_allowed(guarded, caller, now))

    async def _caller(self, scope: Scope) -> tuple[ApiToken | None, Caller | None]:
        given, address = _given_token(scope), _address(scope)
        token = self._agent.tokens.check(given, address) if given is not None else None
        return token, await self._agent.team.token(token, address) if token is not None else None

    async def _now(self, token: ApiToken, address: str) -> Caller | None:
        return await self._agent.team.token(token, address) if self._agent.tokens.is_valid(token.id) else None

    def _refuse(self, scope: Scope) -> Response:
        if "authorization" in Headers(scope=scope):
            entry = AuditEntry(now(), "", _address(scope), "sign in", "by token", REFUSED)
            self._agent.audit.note_refused(entry, boot_clock_s())
        error = NotAllowed("a valid token is needed", hint="send it as Authorization: Bearer ugro_…")
        # So that a browser asks for the token, which it may send only for the description.
        way = 'Basic realm="UGRO: the token is the password"' if _is_description(scope) else 'Bearer realm="UGRO"'
        return _error(error, 401, {"www-authenticate": way})

    async def _docs(self) -> Response:
        assert isinstance(self._api, FastAPI)
        page = docs_page(await asyncio.to_thread(described, self._api))
        return Response(page, media_type="text/html", headers={"content-security-policy": CONTENT_POLICY})


def _given_token(scope: Scope) -> str | None:
    """As ``Bearer``; or as a password (Basic) for the description alone: browsers send that unasked, from any site."""
    scheme, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic" or not _is_description(scope):
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, ValueError):
        return None


def _is_description(scope: Scope) -> bool:
    return scope["path"] in (DOCS, DESCRIPTION) and scope["method"] in ("GET", "HEAD")


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown address"


def _inner(scope: Scope) -> Scope:
    """As on the socket; what commands say about themselves (their environment) is not for others to say."""
    path = scope["path"].removeprefix(PREFIX)
    headers = [(name, value) for name, value in scope["headers"] if not name.startswith(b"ugro-")]
    return {**scope, "path": path, "raw_path": path.encode("utf-8", "replace"), "root_path": "", "headers": headers}


def _error(error: UgroError, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps({"error": error.to_wire()}), status, headers, media_type="application/json")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
