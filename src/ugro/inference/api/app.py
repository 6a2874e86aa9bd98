"""The application: its routes, and how every refusal looks."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from ugro.inference.api import openai, plain
from ugro.inference.api.guard import Guard
from ugro.inference.refusals import Refused, error_body
from ugro.inference.service import Service
from ugro.telemetry.prometheus import CONTENT_TYPE


def create_app(service: Service, key: bytes | None) -> Guard:
    app = FastAPI(title=f"UGRO inference: {service.options.name}", description=_ABOUT)
    app.include_router(openai.router(service))
    app.include_router(plain.router(service))

    @app.get("/health", tags=["server"], summary="200 when the model can answer, else 503 with a reason")
    async def health() -> Response:
        is_ready, found = service.health()
        return JSONResponse(found, 200 if is_ready else 503)

    @app.get("/metrics", tags=["server"], summary="Prometheus' text")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE)

    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return Guard(app, service.metrics, key)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status, error.headers())


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Of a value that fits none of several kinds, the complaint that got furthest into it says most.
    found: dict[str, Any] = max(error.errors(), key=lambda one: len(one["loc"]))
    message, param, code = _complaint(found)
    return JSONResponse(error_body(400, message, param=param, code=code), 400)


def _complaint(found: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """A sentence, the parameter that it is about, and a code."""
    if found["type"] == "json_invalid":
        return f"the body is not valid JSON: {found.get('ctx', {}).get('error')}", None, None
    if found["type"] == "model_attributes_type" and len(found["loc"]) == 1:
        return "the body is not a JSON object; is the header Content-Type: application/json set?", None, None
    param = ".".join(str(part) for part in found["loc"][1:] if not _names_a_kind(part)) or None
    if found["type"] in {"extra_forbidden", "none_required"} or param in _ONLY_OFF:
        return f"{param}: not supported by this server", param, "unsupported"
    return f"{param or 'the body'}: {found['msg'].removeprefix('Value error, ')}", param, None


def _names_a_kind(part: object) -> bool:
    """pydantic adds which kind of a union it tried, such as ``list[str]`` or ``str``."""
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "TextPart"})


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    """A fault of ours: its traceback is in the log."""
    return JSONResponse(error_body(500, f"the server failed: {type(error).__name__}"), 500)


# They may be given, as what turns them off.
_ONLY_OFF = frozenset({"logprobs", "store", "best_of"})
_ABOUT = """The routes below `/v1` are OpenAI's; use any of its clients with `base_url=…/v1`.
Which ones answer depends on what the model does: it generates, classifies or embeds."""
