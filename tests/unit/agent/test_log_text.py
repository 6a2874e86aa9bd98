"""A log as plain text: its bytes as they are, and what UGRO says of them on lines of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ugro.kernel.files.results.log_stream import log_text
from ugro.kernel.support.errors import UgroError
from ugro.node import wire


def text_of(*frames: bytes, cut: int = 1 << 20) -> bytes:
    """``cut``: how many bytes of frames come at once."""
    content = b"".join(frames)

    async def pieces() -> AsyncGenerator[bytes]:
        for begin in range(0, len(content), cut):
            yield content[begin : begin + cut]

    async def read() -> bytes:
        return b"".join([piece async for piece in log_text(pieces())])

    return asyncio.run(read())


def at(attempt: int, number: int, dropped: int = 0) -> bytes:
    place = {"attempt": attempt, "rank": 0, "node": "gpu1", "offset": 0, "dropped_bytes": dropped}
    return wire.message(wire.CALL, number, place)


def test_bytes_come_as_they_are_however_frames_arrive() -> None:
    begin = wire.message(wire.CALL, 0, {"job": 1, "from_attempt": 1})
    frames = (begin, at(1, 1), wire.frame(wire.OUT, 1, b"one \xff\n"), wire.frame(wire.OUT, 1, b"two"))
    for cut in (1, 7, 1000):
        assert text_of(*frames, cut=cut) == b"one \xff\ntwo"


def test_a_new_attempt_a_gap_and_an_early_end_are_said_on_lines_of_their_own() -> None:
    found = text_of(
        at(1, 1),
        wire.frame(wire.OUT, 1, b"half a line"),
        at(1, 1, 2_000_000),
        at(2, 2),
        wire.frame(wire.OUT, 2, b"again\n"),
        wire.message(wire.ERROR, 0, UgroError("the agent was stopped").to_wire()),
    )
    assert found.decode().splitlines() == [
        "half a line",
        "[1.9 MiB of this log were dropped on gpu1: it grew too large]",
        "[attempt 2]",
        "again",
        "[this log is not complete: the agent was stopped]",
    ]
