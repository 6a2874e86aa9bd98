"""What the box of a service's page sends to the service: one of a few requests, made here of a few fields. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import UsageError

KINDS = {
    "chat": "Chat",
    "complete": "Complete a text",
    "classify": "Classify",
    "embed": "Embed",
    "predict": "Predict",
}
_MOST_DEPTH = 100_000  # letters of JSON, so that it cannot be nested without end
_STREAMS = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Wish:
    kind: str
    model: str
    text: str = ""
    messages: Sequence[dict[str, str]] = ()
    image: str = ""  # a data: URL
    max_tokens: int = 128
    temperature: float = 0.7


def request_of(wish: Wish) -> tuple[str, dict[str, Any]]:
    """The path and the body."""
    limits = {"max_tokens": wish.max_tokens, "temperature": wish.temperature, **_STREAMS}
    if wish.kind == "chat":
        if not wish.messages:
            raise UsageError("there is no message", hint="write one")
        return "/v1/chat/completions", {"model": wish.model, "messages": list(wish.messages), **limits}
    if wish.kind == "classify" and wish.image:
        return "/classify", {"images": [wish.image]}
    if not wish.text.strip():
        raise UsageError("there is no text", hint="write one")
    if wish.kind == "complete":
        return "/v1/completions", {"model": wish.model, "prompt": wish.text, **limits}
    if wish.kind == "classify":
        return "/classify", {"texts": _lines(wish.text)}
    if wish.kind == "embed":
        return "/v1/embeddings", {"model": wish.model, "input": _lines(wish.text)}
    return "/predict", {"inputs": _inputs(wish.text)}


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _inputs(text: str) -> list[Any]:
    """A JSON list; anything else is one input."""
    if len(text) > _MOST_DEPTH:
        raise UsageError(f"the input is longer than {_MOST_DEPTH} letters", hint="send a shorter one")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("the input is not JSON", hint='such as [1.5, 2] or ["a text"]') from None
    return found if isinstance(found, list) else [found]


def problem_of(status: int, text: str) -> str:
    """What a service said when it refused a request: OpenAI's form, or the beginning of anything else."""
    try:
        error = json.loads(text)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text
    printable = "".join(letter if letter.isprintable() else " " for letter in message).strip()
    return f"the service answered {status}" + (f": {printable[:500]}" if printable else "")
