"""Prints logs: the bytes of one rank as they are, or whole lines of several ranks, each with a prefix."""

from __future__ import annotations

import binascii
from typing import Any, Protocol

from ugro.cli.output import Output, Style
from ugro.client.job_logs import LogPiece
from ugro.core.support.quantity import format_size

_LONGEST_LINE = 64 * 1024  # that is buffered until its end arrives
_COLOURS: tuple[Style, ...] = ("id", "good", "warn", "bold")
_Source = tuple[int, int]  # attempt and rank


class Printer(Protocol):
    def piece(self, piece: LogPiece) -> None: ...

    def close(self) -> None: ...


def dropped(piece: LogPiece) -> str:
    size = format_size(piece.dropped_bytes)
    return f"rank {piece.rank}: {size} of this log were dropped on {piece.node}: it grew too large"


class Bytes:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._attempt: int | None = None

    def piece(self, piece: LogPiece) -> None:
        if self._attempt not in (None, piece.attempt):
            self._output.note(f"attempt {piece.attempt}:")
        self._attempt = piece.attempt
        if piece.dropped_bytes:
            self._output.warn(dropped(piece))
        if piece.content:
            self._output.raw(piece.content)

    def close(self) -> None:
        """Nothing is buffered."""


class _Whole:
    """Joins pieces to lines; a line too long to buffer is broken."""

    def __init__(self) -> None:
        self._rest: dict[_Source, bytearray] = {}
        self._nodes: dict[_Source, str] = {}

    def piece(self, piece: LogPiece) -> None:
        source = (piece.attempt, piece.rank)
        self._nodes[source] = piece.node
        if piece.dropped_bytes:
            self._flush(source)
            self._show_dropped(piece)
        rest = self._rest.setdefault(source, bytearray())
        rest += piece.content
        lines, end, tail = bytes(rest).rpartition(b"\n")
        if len(tail) > _LONGEST_LINE:
            lines, end, tail = lines + end + tail, b"\n", b""
        if end:
            self._show(source, lines.split(b"\n"))
            self._rest[source] = bytearray(tail)

    def close(self) -> None:
        for source in sorted(self._rest):
            self._flush(source)

    def _flush(self, source: _Source) -> None:
        if rest := bytes(self._rest.pop(source, b"")):
            self._show(source, [rest])

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        raise NotImplementedError

    def _show_dropped(self, piece: LogPiece) -> None:
        raise NotImplementedError


class Prefixed(_Whole):
    """Puts ``rank 1 gpu2 | `` before each line, aligned, each rank in its own colour."""

    def __init__(self, output: Output, *, has_attempts: bool = False) -> None:
        super().__init__()
        self._output = output
        self._has_attempts = has_attempts
        self._width = 0

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        prefix = self._prefix(source)
        if self._output.is_terminal:  # of a progress bar only its last state: it would overwrite the prefix
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self._output.raw(b"".join(prefix + line + b"\n" for line in lines))

    def _show_dropped(self, piece: LogPiece) -> None:
        self._output.warn(dropped(piece))

    def _prefix(self, source: _Source) -> bytes:
        attempt, rank = source
        words = f"rank {rank} {self._nodes[source]}"
        text = f"attempt {attempt} {words}" if self._has_attempts else words
        self._width = max(self._width, len(text))
        return self._output.styled(f"{text.ljust(self._width)} | ", _COLOURS[rank % len(_COLOURS)]).encode()


class Documents(_Whole):
    """NDJSON: one document per line. A line that is not UTF-8 becomes base64."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        for line in lines:
            self._output.document({**self._place(source), **_text(line)})

    def _show_dropped(self, piece: LogPiece) -> None:
        place = self._place((piece.attempt, piece.rank))
        self._output.document({**place, "dropped_bytes": piece.dropped_bytes})

    def _place(self, source: _Source) -> dict[str, Any]:
        return {"attempt": source[0], "rank": source[1], "node": self._nodes[source]}


def _text(line: bytes) -> dict[str, str]:
    try:
        return {"line": line.decode()}
    except UnicodeDecodeError:
        return {"line_base64": binascii.b2a_base64(line, newline=False).decode()}
