"""Search in logs of any size, forwards or backwards, in steps of limited size. These functions block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ugro.agent.artifacts.log_index import line_begin
from ugro.web.logs.pages import Logs, sizes_of

STEP_BYTES = 48 * 1024 * 1024
_BLOCK = 1024 * 1024
END = 1 << 62  # after any log


@dataclass(frozen=True, slots=True)
class Position:
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Found:
    match: Position | None  # start of the matching line
    next: Position | None  # where to continue; None: everything was searched
    searched_bytes: int


def find(logs: Logs, text: str, start: Position, *, is_backwards: bool, limit_bytes: int = STEP_BYTES) -> Found:
    """The first line with the text from ``start`` on, or the last one before it. Case does not matter."""
    wanted = text.encode().lower()
    searched = 0
    for rank in _ranks(logs, start.rank, is_backwards=is_backwards):
        size = sizes_of({rank: logs[rank]})[rank]
        offset = start.offset if rank == start.rank else (END if is_backwards else 0)
        blocks = _backwards(offset, size) if is_backwards else _forwards(offset, size)
        for begin, end in blocks:
            at = _in_block(logs, rank, (begin, end), wanted, is_backwards=is_backwards)
            searched += end - begin
            if at is not None:
                return Found(Position(rank, line_begin(logs[rank], at, 0)), Position(rank, at), searched)
            if searched >= limit_bytes:
                return Found(None, Position(rank, begin if is_backwards else end), searched)
    return Found(None, None, searched)


def line_after(logs: Logs, start: Position) -> Position:
    """The start of the next line or, if the line is very long, a position within it."""
    size = sizes_of({start.rank: logs[start.rank]})[start.rank]
    if start.offset >= size:
        return start
    with logs[start.rank].open("rb") as file:
        file.seek(start.offset)
        return Position(start.rank, start.offset + len(file.readline(_BLOCK)))


def _ranks(logs: Logs, first: int, *, is_backwards: bool) -> list[int]:
    ranks = sorted(logs, reverse=is_backwards)
    return [rank for rank in ranks if (rank <= first if is_backwards else rank >= first)]


def _forwards(begin: int, size: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, size, _BLOCK):
        yield at, min(size, at + _BLOCK)


def _backwards(end: int, size: int) -> Iterator[tuple[int, int]]:
    at = min(end, size)
    while at > 0:
        yield max(0, at - _BLOCK), at
        at = max(0, at - _BLOCK)


def _in_block(logs: Logs, rank: int, block: tuple[int, int], wanted: bytes, *, is_backwards: bool) -> int | None:
    begin, end = block
    # Also matches that start in this block and end in the next; no two blocks contain the same start.
    with logs[rank].open("rb") as file:
        file.seek(begin)
        content = file.read(end - begin + len(wanted) - 1).lower()
    at = content.rfind(wanted) if is_backwards else content.find(wanted)
    return begin + at if 0 <= at < end - begin else None
