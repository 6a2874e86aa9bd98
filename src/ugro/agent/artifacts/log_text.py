"""A log's frames as plain text, for programs that know HTTP alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator

from ugro.core.errors import error_from_wire
from ugro.core.support.quantity import format_size
from ugro.remote import wire


async def log_text(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The bytes of one rank; what UGRO has to say about them stands in brackets, on a line of its own."""
    decoder, text = wire.Decoder(), _Text()
    async with contextlib.aclosing(frames):
        async for content in frames:
            if found := b"".join(text.of(frame) for frame in decoder.feed(content)):
                yield found


class _Text:
    def __init__(self) -> None:
        self._attempt: int | None = None
        self._is_in_line = False

    def of(self, frame: wire.Frame) -> bytes:
        kind, number, payload = frame
        if kind == wire.OUT:
            self._is_in_line = not payload.endswith(b"\n")
            return payload
        if kind == wire.ERROR:
            return self._note(f"this log is not complete: {error_from_wire(wire.parse(payload))}")
        return b"".join(map(self._note, self._news(payload))) if kind == wire.CALL and number else b""

    def _news(self, payload: bytes) -> Iterator[str]:
        place = wire.parse(payload)
        if self._attempt not in (None, place["attempt"]):
            yield f"attempt {place['attempt']}"
        self._attempt = place["attempt"]
        if dropped := place.get("dropped_bytes"):
            yield f"{format_size(dropped)} of this log were dropped on {place['node']}: it grew too large"

    def _note(self, words: str) -> bytes:
        break_first, self._is_in_line = "\n" * self._is_in_line, False
        return f"{break_first}[{words}]\n".encode()
