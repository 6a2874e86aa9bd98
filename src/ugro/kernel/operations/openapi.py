"""The API's description (OpenAPI): what each route is called, takes and answers, and the role that it needs.

Its addresses are those of the HTTPS API. FastAPI describes the requests; what is answered is in ``answers``, or in the
declaration of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Response
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from ugro.kernel.access.model import Caller
from ugro.kernel.access.operations import GetDescription
from ugro.kernel.operations.access_rules import RULES, Access
from ugro.kernel.operations.answers import (
    ANSWERS,
    JSON,
    LINES,
    REFERENCE,
    TEXT,
    Answer,
    AnswerSchemas,
    Schema,
    camel,
    renamed,
    schemas_of,
    short_names,
)
from ugro.kernel.operations.registry import requests as declared
from ugro.kernel.operations.request import Request, answers
from ugro.kernel.operations.responses import json_response

PREFIX = "/api"
_ABOUT = "Requests carry a token: `Authorization: Bearer ugro_…`, made by `ugro token create`."
_ERROR = "Error"
_UNUSED = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, which this API does not answer with
_REASONS = {
    "400": ("BadRequest", "A parameter or the body is wrong."),
    "401": ("Unauthorized", "There is no valid token."),
    "403": ("Forbidden", "The role does not suffice, or the thing is somebody else's."),
    "404": ("NotFound", "There is no such thing, or the caller must not know of it."),
    "409": ("Unsatisfiable", "The cluster can never do this."),
    "default": ("Failed", "Anything else that failed; `kind` says what."),
}


class Description:
    def __init__(self, app: FastAPI) -> None:
        self._app = app

    @answers(GetDescription)
    async def describe(self, asked: GetDescription, caller: Caller) -> Response:
        return json_response(await asyncio.to_thread(described, self._app))


def described(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = _made(app)
    return app.openapi_schema


def _made(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title="UGRO", version=app.version, description=_ABOUT, routes=app.routes)
    for kind in declared():
        _describe(found, kind)
    answered = schemas_of(answer for key, answer in ANSWERS.items() if " /v1/" in key)
    requests = {name: one for name, one in found["components"]["schemas"].items() if name not in _UNUSED}
    names = _request_names(requests, answered.components)
    paths = {path: item for path, item in found["paths"].items() if path.startswith("/v1/")}
    found["paths"] = {PREFIX + path: item for path, item in renamed(paths, names).items()}
    for key, operation in _operations(found["paths"]):
        operation["tags"] = [key.split("/")[2]]
        _complete(operation, RULES.get(key), ANSWERS[key], answered)
    inputs = {names[name]: renamed(one, names) for name, one in requests.items()}
    schemas = {**inputs, **answered.components, **_error_schemas()}
    found["components"] = {
        # Generators name classes by titles: two of the same would be one.
        "schemas": {name: {**one, "title": name} for name, one in sorted(schemas.items())},
        "responses": {name: _error_response(text) for name, text in _REASONS.values()},
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    return found


def _describe(found: dict[str, Any], kind: type[Request[Any]]) -> None:
    """Adds the parameters and the body of a declared request, which FastAPI does not know."""
    operation = kind.operation
    # As FastAPI writes its own: without defaults that are null.
    whole = jsonable_encoder(TypeAdapter(kind).json_schema(ref_template=REFERENCE), exclude_none=True)
    components, inner = found["components"]["schemas"], whole.pop("$defs", {})
    room = camel(kind.__module__.split(".")[-2])
    names = {name: f"{room}{name}" for name, one in inner.items() if components.get(name, one) != one}
    schema = renamed(whole, names)
    for name, one in renamed(inner, names).items():
        own = names.get(name, name)
        assert components.setdefault(own, one) == one, f"two classes would have one name: {own}"
    required = schema.get("required", ())
    properties = {name: one for name, one in schema["properties"].items() if name not in operation.in_headers}
    described = found["paths"][operation.path.replace(":path", "")][operation.method.lower()]
    in_address = operation.places if operation.has_body else properties
    described["parameters"] = [
        {
            "name": name,
            "in": "path" if name in operation.places else "query",
            "required": name in operation.places or name in required,
            "schema": properties[name],
        }
        for name in in_address
    ]
    of_body = {name: one for name, one in properties.items() if name not in in_address}
    if operation.has_body and of_body:
        needed = [name for name in required if name in of_body]
        components[kind.__name__] = {"type": "object", "properties": of_body, "additionalProperties": False} | (
            {"required": needed} if needed else {}
        )
        content = {JSON: {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}}
        described["requestBody"] = {"required": bool(needed), "content": content}


def _request_names(requests: Mapping[str, Schema], answered: Mapping[str, Schema]) -> dict[str, str]:
    """Some classes are sent and answered, and a request may leave out what has a default."""
    names = short_names(requests)
    differ = {old for old, new in names.items() if answered.get(new, requests[old]) != requests[old]}
    return {old: f"{new}Input" if old in differ else new for old, new in names.items()}


def _operations(paths: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With the route that each is in the tables: there, a name that may have slashes is ``{name:path}``."""
    for path, item in paths.items():
        for method, operation in item.items():
            key = f"{method.upper()} {path.removeprefix(PREFIX)}"
            yield key if key in ANSWERS else key.replace("{name}", "{name:path}"), operation


def _complete(operation: dict[str, Any], access: Access | None, answer: Answer, schemas: AnswerSchemas) -> None:
    operation["operationId"] = answer.name
    operation["summary"] = answer.name.replace("_", " ").capitalize()
    operation["x-role"] = str(access.role) if access is not None else "nobody"
    operation["security"] = [{"token": []}]
    has_body = "204" not in operation["responses"]
    shapes = schemas.shapes.get(answer.name, ())
    good = {"200": _response(answer, shapes)} if has_body else {"204": {"description": "Done."}}
    operation["responses"] = {**good, **dict(_errors(operation))}


def _errors(operation: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    parameters = operation.get("parameters", ())
    is_here = {
        "400": bool(parameters) or "requestBody" in operation,
        "404": any(one["in"] == "path" for one in parameters),
        "409": "requestBody" in operation,
    }
    for status, (name, _) in _REASONS.items():
        if is_here.get(status, True):
            yield status, {"$ref": f"#/components/responses/{name}"}


def _response(answer: Answer, shapes: tuple[Schema, ...]) -> Schema:
    if answer.media == JSON:
        return {"description": "Done.", "content": {JSON: {"schema": _one_of(shapes)}}}
    if answer.media == LINES:
        text = "A stream of JSON documents, one per line; an error after its start is the last line."
        line = _one_of((*shapes, _reference(_ERROR)) if shapes else ())
        return {"description": text, "content": {LINES: {"schema": {"type": "string"}, "x-line": line}}}
    if answer.media == TEXT:
        return {"description": "A stream of text.", "content": {TEXT: {"schema": {"type": "string"}}}}
    bare = {"type": "string", "format": "binary"}
    return {"description": "A stream of bytes, for the commands of UGRO.", "content": {answer.media: {"schema": bare}}}


def _one_of(shapes: tuple[Schema, ...]) -> Schema:
    return shapes[0] if len(shapes) == 1 else {"anyOf": list(shapes)} if shapes else {}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _error_response(text: str) -> Schema:
    return {"description": text, "content": {JSON: {"schema": _reference(_ERROR)}}}


def _error_schemas() -> dict[str, Schema]:
    """The document of every error; some kinds have more fields."""
    text: Schema = {"type": "string"}
    maybe: Schema = {"anyOf": [text, {"type": "null"}]}
    facts = {"kind": text, "message": text, "hint": maybe, "subject": maybe}
    parts: dict[str, dict[str, Schema]] = {"ErrorFacts": facts, _ERROR: {"error": _reference("ErrorFacts")}}
    return {
        name: {"type": "object", "properties": one, "required": list(one), "additionalProperties": True}
        for name, one in parts.items()
    }
