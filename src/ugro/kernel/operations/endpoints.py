"""The agent's side of operations: finds what answers each request, and serves it as a route.

Who may ask is checked by the gate before the body is read; here a request becomes a value of its class, or one error.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from ugro.kernel.access.model import Caller
from ugro.kernel.operations.request import ABOUT, ANSWERS, CALLER, Raw, Request, operation_name
from ugro.kernel.operations.responses import LiveResponse, json_response, large_json_response, ndjson, while_connected

_LINES = "application/x-ndjson"
Handler = Callable[[Any, Caller], Awaitable[Any]]


def handlers_of(services: Iterable[object]) -> dict[type[Request[Any]], Handler]:
    """Returns the bound methods that are marked, by what they answer. Raises if two answer the same."""
    found: dict[type[Request[Any]], Handler] = {}
    for service in services:
        for name, member in inspect.getmembers_static(type(service)):
            kind = getattr(member, ANSWERS, None)
            if kind is None:
                continue
            if kind in found:
                raise TypeError(f"{kind.__name__} has two answers: {found[kind]} and {type(service).__name__}.{name}")
            found[kind] = getattr(service, name)
    return found


def add_operations(
    app: FastAPI, kinds: Iterable[type[Request[Any]]], handlers: Mapping[type[Request[Any]], Handler]
) -> None:
    """Adds a route for each. Raises if one has nobody who answers it."""
    for kind in kinds:
        if kind not in handlers:
            raise TypeError(f"{kind.__name__} is declared, and no service answers it")
        operation = kind.operation
        app.add_api_route(
            operation.path,
            _endpoint(kind, handlers[kind]),
            methods=[operation.method],
            name=operation_name(kind),
            description=inspect.getdoc(kind),
            status_code=204 if operation.answer is None else 200,
            response_class=Response,
        )


def _endpoint(kind: type[Request[Any]], handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    operation, parser = kind.operation, _Parser(kind)

    async def respond(http: HttpRequest, asked: Request[Any]) -> Response:
        answer = await handler(asked, http.scope[CALLER])
        if (about := asked.about(answer)) is not None:
            http.scope.get(ABOUT, []).append(about)
        if operation.line is not None:
            return LiveResponse(ndjson(answer), _LINES)
        if isinstance(answer, AsyncGenerator):
            return LiveResponse(answer, operation.media)
        if operation.answer is Raw:
            response: Response = answer
            return response
        if operation.answer is None:
            return Response(status_code=204)
        return await large_json_response(answer) if operation.is_large else json_response(answer)

    async def endpoint(http: HttpRequest) -> Response:
        work = respond(http, await parser.parse(http))  # what waits for the client's end would read the body, too
        return await (while_connected(http, work) if operation.ends_with_client else work)

    return endpoint


class _Parser:
    """Makes values of one class from requests."""

    def __init__(self, kind: type[Request[Any]]) -> None:
        self._kind = kind
        self._operation = kind.operation

    @cached_property
    def _shape(self) -> TypeAdapter[Request[Any]]:
        return TypeAdapter(self._kind)  # it takes milliseconds: made when it is first asked for

    @cached_property
    def _several(self) -> frozenset[str]:
        """The fields that an address may have more than once."""
        properties = self._shape.json_schema()["properties"]
        return frozenset(name for name, one in properties.items() if one.get("type") == "array")

    async def parse(self, http: HttpRequest) -> Request[Any]:
        """Returns the request as a value. Raises RequestValidationError."""
        given = await self._given(http)
        if not isinstance(given, dict):
            raise _wrong("expected a JSON object")
        apart = {name: http.headers.get(name.replace("_", "-")) for name in self._operation.in_headers}
        if taken := sorted({*self._operation.places, *apart} & given.keys()):
            raise _wrong("it is in the address" if taken[0] not in apart else "it is a header", taken[0])
        try:
            return self._shape.validate_python({**given, **apart, **http.path_params})
        except ValidationError as error:
            raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error

    async def _given(self, http: HttpRequest) -> Any:
        if not self._operation.has_body:
            query = http.query_params
            return {name: query.getlist(name) if name in self._several else query[name] for name in query}
        names = {one.name for one in fields(self._kind)}  # type: ignore[arg-type]  # it is a dataclass
        if names <= {*self._operation.places, *self._operation.in_headers} or not await http.body():
            return {}
        if "json" not in http.headers.get("content-type", ""):
            raise _wrong("the body is not declared as JSON")
        try:
            return await http.json()
        except ValueError as error:
            raise _wrong(f"not JSON: {error}") from error


def _wrong(text: str, *where: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("body", *where), "msg": text, "type": "value_error"}])
