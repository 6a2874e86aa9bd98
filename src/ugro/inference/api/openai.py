"""OpenAI's routes: models, chat, completions, embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ugro.inference.api.bodies import MOST_TEXTS, ChatBody, CompletionBody, EmbeddingBody, Generation
from ugro.inference.api.replies import Reply, events, unless_gone, whole
from ugro.inference.generation.sampling import Sampling
from ugro.inference.generation.sequence import Wish
from ugro.inference.refusals import bad
from ugro.inference.service import Service

if TYPE_CHECKING:
    from ugro.inference.generation.generator import Generator

_COMPLETION_TOKENS = 16  # OpenAI's default for the older route
_EVENT_STREAM = "text/event-stream"
# Proxies that buffer would hold tokens back.
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    def about() -> dict[str, Any]:
        return {"id": service.options.name, "object": "model", "created": service.created, "owned_by": "ugro"}

    @routes.get("/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about()]}

    @routes.get("/models/{name:path}", summary="The model, if it has this name")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return about()

    @routes.post("/chat/completions", summary="The next message of a chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        generator = service.generator()
        messages = [message.plain() for message in body.messages]
        prompt = await asyncio.to_thread(generator.prompts.chat, messages)
        wish = generator.wish(prompt, sampling(body), body.max_completion_tokens or body.max_tokens)
        reply = Reply(True, service.options.name, len(prompt))
        stops = (*_stops(body), *generator.prompts.chat_stops)
        return await _answered(service, request, body, _Asked(generator, [wish], stops, reply))

    @routes.post("/completions", summary="How texts go on")
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        generator = service.generator()
        prompts = await asyncio.to_thread(_prompts, generator, body.prompt)
        wishes = [generator.wish(one, sampling(body), body.max_tokens, _COMPLETION_TOKENS) for one in prompts]
        echoes = [generator.prompts.decode(one) for one in prompts for _ in range(body.n or 1)] if body.echo else ()
        reply = Reply(False, service.options.name, sum(map(len, prompts)), echoes)
        return await _answered(service, request, body, _Asked(generator, wishes, _stops(body), reply))

    @routes.post("/embeddings", summary="Vectors of texts")
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        service.check_model(body.model)
        batcher = service.batcher("embed")
        texts = [body.input] if isinstance(body.input, str) else body.input
        _check_texts(texts, "input")
        found = await unless_gone(request, batcher.submit(texts), service.metrics)
        return JSONResponse(_embeddings(service, body, found))

    return routes


class _Asked:
    def __init__(self, generator: Generator, wishes: Sequence[Wish], stops: Sequence[str], reply: Reply) -> None:
        self.generator, self.wishes, self.stops, self.reply = generator, wishes, stops, reply


async def _answered(service: Service, request: Request, body: Generation, asked: _Asked) -> Response:
    count = body.n or 1
    answer = asked.generator.ask(asked.wishes, count, asked.stops)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        stream = events(asked.reply, answer, has_usage, service.metrics)
        return StreamingResponse(stream, media_type=_EVENT_STREAM, headers=_UNBUFFERED)
    try:
        done = whole(asked.reply, answer, count * len(asked.wishes))
        return JSONResponse(await unless_gone(request, done, service.metrics))
    finally:
        answer.close()


def sampling(body: Generation) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias={int(token): value for token, value in (body.logit_bias or {}).items()},
    )


def _stops(body: Generation) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _prompts(generator: Generator, prompt: str | list[str] | list[int] | list[list[int]]) -> list[tuple[int, ...]]:
    """A text, texts, the tokens of one, or of several."""
    if isinstance(prompt, str):
        return [generator.prompts.text(prompt)]
    if not prompt:
        raise bad("the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [_tokens(generator, prompt)]
    return [generator.prompts.text(one) if isinstance(one, str) else _tokens(generator, one) for one in prompt]


def _tokens(generator: Generator, tokens: Any) -> tuple[int, ...]:
    if not all(0 <= token < generator.vocabulary for token in tokens):
        raise bad(f"tokens are numbers from 0 to {generator.vocabulary - 1}", "prompt")
    return tuple(tokens)


def _check_texts(texts: list[str], param: str) -> None:
    if not texts or len(texts) > MOST_TEXTS:
        raise bad(f"between 1 and {MOST_TEXTS} texts are expected, and not {len(texts)}", param)
    if not all(texts):
        raise bad("a text is empty", param)


def _embeddings(service: Service, body: EmbeddingBody, found: list[tuple[list[float], int]]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": at, "embedding": _vector(vector, body)} for at, (vector, _) in enumerate(found)
    ]
    tokens = sum(count for _, count in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.options.name, "usage": usage}


def _vector(vector: list[float], body: EmbeddingBody) -> list[float] | str:
    """Cut to fewer dimensions, it is brought back to length 1."""
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise bad(f"the model's vectors have {len(vector)} dimensions", "dimensions")
        vector = vector[: body.dimensions]
        length = sum(value * value for value in vector) ** 0.5 or 1.0
        vector = [value / length for value in vector]
    if body.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector
