"""Streams end when those who opened them may not do so any more: a token ends, a role is lowered, a member leaves."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from ugro.core.identity import Caller

LOOKED_S = 1.0  # how often it is looked at, while something is sent


def while_allowed(send: Send, caller: Caller, now: Callable[[], Awaitable[Caller | None]]) -> Send:
    """``now``: who this is, and what they may do, at this moment; None: nothing any more."""
    is_over, looked_at = False, time.monotonic()

    async def sending(message: Message) -> None:
        nonlocal is_over, looked_at
        if is_over:
            return
        if message.get("more_body", False) and time.monotonic() - looked_at >= LOOKED_S:
            looked_at = time.monotonic()
            found = await now()
            is_over = found is None or not found.role.covers(caller.role)
        await send({"type": "http.response.body", "body": b"", "more_body": False} if is_over else message)

    return sending
