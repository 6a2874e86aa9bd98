"""One measuring process on a node: started, listened to, and ended in time, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ugro.agent.hardware.lines import Lines, printable
from ugro.core.errors import RemoteFailure, UgroError
from ugro.core.support.codec import DecodeError
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.remote import wire

_MOST_BYTES = 256 * 1024  # of one process
_KEPT_STDERR = 4096
_END_S = 5.0  # how long it may take until it is gone

# The names of parts, for people.
WORDS = {"listen": "network", "connect": "network", "allreduce": "all-reduce", "count": "all-reduce"}


async def run(link: Link, part: str, params: dict[str, Any], limit_s: float, lines: Lines) -> None:
    """Returns when the process is gone. Why it found less than it should have is among what was skipped."""
    process = _Process(link, part, lines)
    try:
        async with asyncio.timeout(limit_s):
            await process.follow(link.stream("bench", {"part": part, **params}))
    except TimeoutError:
        lines.skip(WORDS.get(part, part), "the time was up")
        await process.end()
    except DecodeError as error:
        lines.skip(WORDS.get(part, part), f"invalid figures from node: {error}")
    except RemoteFailure as error:
        lines.skip(WORDS.get(part, part), printable(error.message))
    finally:
        process.cancel()


class _Process:
    def __init__(self, link: Link, part: str, lines: Lines) -> None:
        self._link = link
        self._part = part
        self._lines = lines
        self._stream: Stream | None = None
        self._unread = b""
        self._complaint = b""
        self._heard = 0

    async def follow(self, stream: Stream) -> None:
        self._stream = stream
        async for kind, payload in stream:
            self._heard += len(payload)
            if self._heard > _MOST_BYTES:
                raise DecodeError(f"more than {_MOST_BYTES >> 10} KiB")
            if kind == wire.ERR:
                self._complaint = (self._complaint + payload)[-_KEPT_STDERR:]
                continue
            *whole, self._unread = (self._unread + payload).split(b"\n")
            for line in whole:
                # What the user's own Python prints when it starts is not ours.
                if line.startswith(b"{"):
                    self._lines.take(line)
        self._conclude(await stream.result())

    def _conclude(self, ended: dict[str, Any]) -> None:
        if ended.get("code") == 0:
            return
        how = f"signal {ended.get('signal')}" if ended.get("signal") else f"exit code {ended.get('code')}"
        said = self._complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = f"its process ended with {how}" + (f": {said}" if said else "")
        self._lines.skip(WORDS.get(self._part, self._part), why)

    async def end(self) -> None:
        """Waits until it is gone: what comes next must not be measured beside it."""
        if self._stream is not None:
            self._stream.ask_to_stop()
            with contextlib.suppress(UgroError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._stream.result()

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
