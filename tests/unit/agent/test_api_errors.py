"""What a client gets when something unexpected happens in the agent: one line that says what, never a bare number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI

from ugro.kernel.operations.app import answer_errors
from ugro.kernel.operations.responses import ndjson


async def answered(app: FastAPI, path: str) -> tuple[int, dict[str, Any]]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    with pytest.raises(ZeroDivisionError):  # the server logs it
        await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


def test_a_bug_is_answered_with_what_happened() -> None:
    app = FastAPI()
    answer_errors(app)

    @app.get("/bug")
    async def bug() -> float:
        return 1 / 0

    status, answer = asyncio.run(answered(app, "/bug"))
    assert status == 500
    assert answer["error"]["message"] == "internal error in the agent: ZeroDivisionError: division by zero"
    assert "ugro agent logs" in answer["error"]["hint"]


def test_a_bug_in_the_middle_of_a_stream_is_its_last_line() -> None:
    async def broken() -> AsyncGenerator[list[Any]]:
        yield [{"number": 1}]
        raise ZeroDivisionError("division by zero")

    async def read() -> list[bytes]:
        return [line async for line in ndjson(broken())]

    first, last = (json.loads(line) for line in asyncio.run(read()))
    assert first == {"number": 1}
    assert last["error"]["message"] == "internal error in the agent: ZeroDivisionError: division by zero"
