"""The API's description (OpenAPI), with the role that each route needs. Its addresses are those of the HTTPS API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ugro.agent.api.access_rules import RULES

PREFIX = "/api"
_ABOUT = "Requests carry a token: `Authorization: Bearer ugro_…`, made by `ugro token create`."


def described(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = _made(app)
    return app.openapi_schema


def _made(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title="UGRO", version=app.version, description=_ABOUT, routes=app.routes)
    found["paths"] = {PREFIX + path: item for path, item in found["paths"].items() if path.startswith("/v1/")}
    for path, item in found["paths"].items():
        for method, operation in item.items():
            operation["x-role"] = _role(method, path.removeprefix(PREFIX))
            operation["security"] = [{"token": []}]
    found.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return found


def _role(method: str, path: str) -> str:
    key = f"{method.upper()} {path}"
    rule = RULES.get(key) or RULES.get(key.replace("{name}", "{name:path}"))
    return str(rule.role) if rule is not None else "nobody"
