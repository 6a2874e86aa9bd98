"""The stream that keeps pages up to date: server-sent events, whose id is the number of the last event.

A browser that reconnects sends the id that it has seen and receives all events after it. Node reports are sent again.
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

_HEARTBEAT_S = 5.0
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
        # A larger number is from another agent's database: start at our newest.
        begin = newest if seen is None else min(seen, newest)
        return LiveResponse(_events(agent, begin), "text/event-stream")


async def _events(agent: Agent, after: int) -> AsyncGenerator[bytes]:
    yield f"retry: {_RETRY_MS}\nid: {after}\n{_event('beat', {'now': time.time()})}".encode()
    try:
        async with contextlib.aclosing(_with_heartbeats(agent.monitoring.changes(after))) as batches:
            async for batch in batches:
                yield "".join(batch).encode()
    except UgroError as error:
        yield _event("bye", error.to_wire()).encode()


async def _with_heartbeats(changes: AsyncGenerator[list[dict[str, Any]]]) -> AsyncGenerator[list[str]]:
    """Adds a heartbeat every few seconds, because a page cannot tell silence from a cut connection."""
    pending: asyncio.Task[list[dict[str, Any]]] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([pending], timeout=_HEARTBEAT_S)
            if not done:
                yield [_event("beat", {"now": time.time()})]
                continue
            lines = pending.result()
            pending = None
            yield [f"id: {line['cursor']}\ndata: {dumps(line)}\n\n" for line in lines]
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])
        await changes.aclose()


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {dumps(value)}\n\n"
