"""Request bodies and responses of the API: strict bodies, JSON, and streams that end when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.types import Receive, Scope, Send

from ugro.kernel.access.caller import caller, shown
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.codec import dumps, dumps_shown
from ugro.kernel.support.errors import UgroError

log = logging.getLogger(__name__)


_MOST_ENTRIES = 20_000
_MOST_DEPTH = 100
_MOST_BRACKETS = 300_000  # ten thousand jobs have a fourth of that


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BoundedRequest(Request):
    """Refuses a body of a few MiB that is a million entries: each of them takes the agent some time."""

    async def json(self) -> Any:
        body = await self.body()
        if body.count(b"[") + body.count(b"{") > _MOST_BRACKETS:
            raise HTTPException(400, f"more than {_MOST_BRACKETS:,} [ and {{: submit less at once")
        found = await super().json()
        level = [found] if isinstance(found, dict | list) else []
        for _ in range(_MOST_DEPTH):
            if not level:
                return found
            inside = [one.values() if isinstance(one, dict) else one for one in level]
            if (most := max(map(len, inside), default=0)) > _MOST_ENTRIES:
                text = f"{most:,} entries in one list or map, at most {_MOST_ENTRIES:,} are taken"
                raise HTTPException(400, f"{text}: put them into a file that is read where they are used")
            level = [value for values in inside for value in values if isinstance(value, dict | list)]
        raise HTTPException(400, f"more than {_MOST_DEPTH} maps and lists in each other")


class LiveResponse(Response):
    """A stream that ends as soon as the client disconnects, even while there is nothing to send."""

    def __init__(self, chunks: AsyncGenerator[bytes], media_type: str) -> None:
        self._chunks = chunks
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.init_headers(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        stream = asyncio.create_task(self._send(send), name=f"stream {scope.get('path')}")
        leave = asyncio.create_task(_left(receive), name="client leaves")
        try:
            await asyncio.wait([stream, leave], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leave.cancel()
            if not stream.done():
                stream.cancel()
                await asyncio.wait([stream])
        if not stream.cancelled():
            stream.result()

    async def _send(self, send: Send) -> None:
        # Closed at once: what it holds (a command, a link) must not wait for the garbage collector.
        async with contextlib.aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer. If the client leaves before there is one, the work is cancelled: nobody would learn of its result."""
    answer = asyncio.create_task(work, name=f"answer {request.url.path}")
    leave = asyncio.create_task(_left(request.receive), name="client leaves")
    try:
        await asyncio.wait([answer, leave], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leave.cancel()
        if not answer.done():
            answer.cancel()
            await asyncio.wait([answer])
    if answer.cancelled():
        log.info("the client left before its answer: %s", request.url.path)
        return Response(status_code=499)
    return answer.result()


async def ndjson(batches: AsyncGenerator[list[Any]]) -> AsyncGenerator[bytes]:
    """One JSON document per line; an error after the start is the last line."""
    try:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield "".join(f"{dumps_for_caller(value)}\n" for value in batch).encode()
    except UgroError as error:
        yield (dumps({"error": error.to_wire()}) + "\n").encode()
    except Exception as error:  # the client would see only that its answer ends early
        log.exception("a stream failed")
        yield (dumps({"error": internal_error(error).to_wire()}) + "\n").encode()


def internal_error(error: Exception) -> UgroError:
    """A bug in UGRO, in one line."""
    text = f"internal error in the agent: {type(error).__name__}: {error}"
    return UgroError(text, hint="please report it with the end of: ugro agent logs")


def json_response(value: Any) -> Response:
    return Response(dumps_for_caller(value), media_type="application/json")


async def large_json_response(value: Any) -> Response:
    """Of thousands of dataclasses, which take seconds: others are answered between any two of them."""
    return await asyncio.to_thread(json_response, value)


def dumps_for_caller(value: Any) -> str:
    """Jobs of others come without the values of their environment, wherever they are in the answer."""
    asks = caller()
    if asks is None or asks.is_alone:
        return dumps(value)
    return dumps_shown(value, lambda one: shown(one) if isinstance(one, Job) else one)
