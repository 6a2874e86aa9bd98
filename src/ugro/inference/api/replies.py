"""The answers of OpenAI's routes, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from ugro.inference.generation.sequence import Answer, Piece
from ugro.inference.metrics import Metrics
from ugro.inference.refusals import Refused, error_body, model_failed

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
