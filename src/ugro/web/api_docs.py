"""The page that describes the HTTPS API, for people: made here from its OpenAPI document, without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

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
