"""The stream that keeps pages up to date: server-sent events, whose id is the number of the last event.

A browser that was cut off says which one it has seen, and gets what came after it. Reports of nodes come anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Response

from ugro.agent.agent import Agent
from ugro.agent.api.responses import LiveResponse
from ugro.core.errors import UgroError
from ugro.core.support.codec import dumps

_BEAT_S = 5.0
_RETRY_MS = 1000
_LARGEST = 1 << 53


def add_live(app: FastAPI, agent: Agent) -> None:
    @app.get("/live")
    async def live(
        after: Annotated[int | None, Query(ge=0, lt=_LARGEST)] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        seen = int(last_event_id) if last_event_id and last_event_id.isdecimal() else after
        newest = await agent.store.ends.newest()
        # Of another agent, whose numbers went further: nobody waits until ours do.
        begin = newest if seen is None else min(seen, newest)
        return LiveResponse(_events(agent, begin), "text/event-stream")


async def _events(agent: Agent, after: int) -> AsyncGenerator[bytes]:
    yield f"retry: {_RETRY_MS}\nid: {after}\n{_event('beat', {'now': time.time()})}".encode()
    try:
        async with contextlib.aclosing(_with_beats(agent.watching.changes(after))) as batches:
            async for batch in batches:
                yield "".join(batch).encode()
    except UgroError as error:
        yield _event("bye", error.to_wire()).encode()


async def _with_beats(changes: AsyncGenerator[list[dict[str, Any]]]) -> AsyncGenerator[list[str]]:
    """A page cannot tell silence from a cut cable: every few seconds there is a sign of life."""
    coming: asyncio.Task[list[dict[str, Any]]] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([coming], timeout=_BEAT_S)
            if not done:
                yield [_event("beat", {"now": time.time()})]
                continue
            lines = coming.result()
            coming = None
            yield [f"id: {line['cursor']}\ndata: {dumps(line)}\n\n" for line in lines]
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming])
        await changes.aclose()


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {dumps(value)}\n\n"
