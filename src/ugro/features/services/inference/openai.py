"""OpenAI's routes: models, chat, completions, embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ugro.features.services.inference.guard import Metrics, Refused, bad, error_body, model_failed
from ugro.features.services.inference.sequence import Answer, Piece, Sampling, Wish
from ugro.features.services.inference.service import Service

if TYPE_CHECKING:
    from ugro.features.services.inference.generation import Generator


# --- bodies -----------------------------------------------------------------------------------------------------------
# What clients send. A field that is not named here is refused by name, rather than ignored in silence.


MOST_CHOICES = 8
MOST_STOPS = 4
MOST_TEXTS = 2048
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    # Bookkeeping of OpenAI's own service: no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Generation(Body):
    """What a chat and a completion have in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MOST_STOPS or not all(stops):
            raise ValueError(f"at most {MOST_STOPS} texts, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if not all(token.isdecimal() and -100 <= value <= 100 for token, value in (bias or {}).items()):
            raise ValueError("numbers of tokens with values from -100 to 100")
        return bias


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None  # clients send the assistant's message back as they got it

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class PlainText(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatBody(Generation):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    response_format: PlainText | None = None
    store: Literal[False] | None = None


class CompletionBody(Generation):
    prompt: str | list[str] | list[int] | list[Tokens]
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: None = None


class EmbeddingBody(Body):
    input: str | list[str]
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None


class GenerateBody(Body):
    text: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    stop: list[Text] = Field(default=[], max_length=MOST_STOPS)
    seed: int | None = None


class ClassifyBody(Body):
    texts: list[str] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    images: list[str] | None = Field(None, min_length=1, max_length=MOST_TEXTS, description="base64, or data: URLs")
    top: int | None = Field(None, ge=1)


class EmbedBody(Body):
    texts: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)


class PredictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inputs: list[Any] = Field(min_length=1, max_length=MOST_TEXTS)


# --- replies ----------------------------------------------------------------------------------------------------------
# The answers of OpenAI's routes, whole or as a stream of events.


T = TypeVar("T")
_CLIENT_GONE = 499
_DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Reply:
    """One request's answer as it takes shape: which route it is for, and what has been generated."""

    is_chat: bool
    model: str
    prompt_tokens: int
    echoes: Sequence[str] = ()  # what each text begins with, if the prompt is to be repeated
    generated: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, is_chunk: bool) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if is_chunk else ''}" if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated, "total_tokens": total}

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": self._echo(index) + text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish}

    def chunk(self, piece: Piece, is_first: bool) -> dict[str, Any]:
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            said: dict[str, Any] = {"delta": {**role, **({"content": piece.text} if piece.text or is_first else {})}}
        else:
            said = {"text": (self._echo(piece.index) if is_first else "") + piece.text}
        return {"index": piece.index, **said, "logprobs": None, "finish_reason": piece.finish}

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""


async def whole(reply: Reply, answer: Answer, count: int) -> dict[str, Any]:
    texts, finishes = [""] * count, [""] * count
    async for piece in answer.pieces():
        if piece.error is not None:
            raise model_failed(piece.error)
        texts[piece.index] += piece.text
        finishes[piece.index] = piece.finish or ""
        reply.generated += piece.tokens
    choices = [reply.choice(index, texts[index], finishes[index]) for index in range(count)]
    return {**reply.head(False), "choices": choices, "usage": reply.usage()}


async def events(reply: Reply, answer: Answer, has_usage: bool, metrics: Metrics) -> AsyncIterator[str]:
    """Server-sent events. When the client goes, the generation is stopped."""
    seen: set[int] = set()
    usage = {"usage": None} if has_usage else {}
    is_finished = False
    try:
        async for piece in answer.pieces():
            if piece.error is not None:
                is_finished = True
                yield _event(error_body(500, piece.error, code="model_failed"))
                return
            reply.generated += piece.tokens
            is_first = piece.index not in seen
            seen.add(piece.index)
            if piece.text or is_first or piece.finish:
                yield _event({**reply.head(True), "choices": [reply.chunk(piece, is_first)], **usage})
        if has_usage:
            yield _event({**reply.head(True), "choices": [], "usage": reply.usage()})
        is_finished = True
        yield _DONE
    finally:
        if not is_finished:
            metrics.gone()
        answer.close()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], metrics: Metrics) -> T:
    """The result of the work; it is cancelled when the client does not wait for it."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            metrics.gone()
            raise Refused(_CLIENT_GONE, "the client has closed the connection")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- openai -----------------------------------------------------------------------------------------------------------


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
