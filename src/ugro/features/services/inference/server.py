"""The HTTP server: it listens at once, loads the model meanwhile, and on SIGTERM finishes what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from ugro.features.services.inference import openai
from ugro.features.services.inference.guard import Guard, Refused, bad, error_body, model_failed
from ugro.features.services.inference.openai import (
    ClassifyBody,
    EmbedBody,
    GenerateBody,
    PredictBody,
    Reply,
    unless_gone,
    whole,
)
from ugro.features.services.inference.options import Options
from ugro.features.services.inference.sequence import Sampling
from ugro.features.services.inference.service import PREDICT, Service, decoded_image
from ugro.kernel.support.errors import UgroError
from ugro.kernel.telemetry.prometheus_text import CONTENT_TYPE

# --- plain ------------------------------------------------------------------------------------------------------------
# Plain routes: a text in, a text, labels or a vector out; and ``/predict`` for a model of the user's own.


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["plain"])
    metrics = service.metrics

    @routes.post("/generate", summary="How a text goes on; the likeliest words unless a temperature is given")
    async def generate(body: GenerateBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        generator = service.generator()
        prompt = await asyncio.to_thread(generator.prompts.text, body.text)
        wish = generator.wish(prompt, Sampling(body.temperature, seed=body.seed), body.max_tokens)
        answer = generator.ask([wish], 1, body.stop)
        try:
            reply = Reply(False, service.options.name, len(prompt))
            found = await unless_gone(request, whole(reply, answer, 1), metrics)
        finally:
            answer.close()
        choice = found["choices"][0]
        return {"text": choice["text"], "finish_reason": choice["finish_reason"], "tokens": reply.generated}

    @routes.post("/classify", summary="Labels with probabilities, of texts or of images in base64")
    async def classify(body: ClassifyBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        batcher = service.batcher("classify")
        items = await asyncio.to_thread(_items, service, body)
        found = await unless_gone(request, batcher.submit(items), metrics)
        return {"results": [_labels(row[: body.top]) for row in found]}

    @routes.post("/embed", summary="Vectors of texts")
    async def embed(body: EmbedBody, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        found = await unless_gone(request, service.batcher("embed").submit(body.texts), metrics)
        return {"vectors": [vector for vector, _ in found]}

    @routes.post("/predict", summary="What the model of --factory makes of the inputs")
    async def predict(body: PredictBody, request: Request) -> Response:
        found = await unless_gone(request, service.batcher(PREDICT).submit(body.inputs), metrics)
        try:
            return JSONResponse({"outputs": jsonable_encoder(found)})
        except (ValueError, TypeError, RecursionError) as error:
            raise model_failed(f"its result cannot be written as JSON: {error}") from error

    return routes


def _items(service: Service, body: ClassifyBody) -> list[Any]:
    wanted, other = ("images", "texts") if service.is_for_images else ("texts", "images")
    items = body.images if service.is_for_images else body.texts
    if items is None or getattr(body, other) is not None:
        raise bad(f"this model classifies {wanted}: send {wanted}, and no {other}", wanted)
    return [decoded_image(one, at) for at, one in enumerate(items)] if service.is_for_images else items


def _labels(row: list[tuple[str, float]]) -> dict[str, Any]:
    scores = [{"label": label, "score": score} for label, score in row]
    return {"label": row[0][0], "score": row[0][1], "scores": scores}


# --- app --------------------------------------------------------------------------------------------------------------
# The application: its routes, and how every refusal looks.


def create_app(service: Service, key: bytes | None) -> Guard:
    app = FastAPI(title=f"UGRO inference: {service.options.name}", description=_ABOUT)
    app.include_router(openai.router(service))
    app.include_router(router(service))

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


# --- server -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)
_BACKLOG = 1024
_KEEP_ALIVE_S = 75  # longer than a proxy keeps an idle connection: it should be the one that closes it


class Unlistenable(UgroError):
    """The address cannot be listened on now; another port, or a later start, may do."""


async def serve(options: Options) -> int:
    """Until SIGTERM (0), or until the model fails (1). Raises UgroError if it cannot be loaded."""
    service = Service(options)
    app = create_app(service, _key(options.key_file))
    try:
        listener = _listening(options.host, options.port)
    except Unlistenable as error:
        log.error("error: %s; hint: %s", error, error.hint)
        return 1
    server = _Server(_config(app, options), service)
    # Also after uvicorn has put its own handler away: it raises the signal once more then, which must not kill us.
    signal.signal(signal.SIGTERM, server.handle_exit)
    model = asyncio.create_task(_kept(service, server), name="the model")
    log.info("listening on %s:%d", options.host, listener.getsockname()[1])
    await server.serve([listener])
    service.close()
    if not model.done():
        model.cancel()
        log.info("stopped")
        return 0
    model.result()
    return 1


async def _kept(service: Service, server: uvicorn.Server) -> None:
    """Ends when the model cannot be loaded or has failed; the server ends with it."""
    try:
        await service.run()
        await service.broke.wait()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)


def _config(app: object, options: Options) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.grace_s)),
    )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise Unlistenable(f"cannot listen on {host}:{port}: {reason}", hint="choose another --port") from error
    return listener


def _key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UgroError(f"the key file {path} cannot be read: {error.strerror}") from error
    if not key:
        raise UgroError(f"the key file {path} is empty")
    return key
