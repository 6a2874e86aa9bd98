"""One text that is being generated, and the answer to a request, which may have several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.inference.generation.sampling import Sampling
from ugro.inference.generation.text import Decode, GrowingText

STOP, LENGTH = "stop", "length"
_BROKEN = "the model computed values that are no numbers (NaN or infinite)"


@dataclass(frozen=True, slots=True)
class Wish:
    """One text to generate."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to a text. The last one of a text has ``finish`` or ``error``."""

    index: int
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: str | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


class Answer:
    """The pieces of a request's texts, in the order in which they are computed. Used from the event loop only."""

    def __init__(self, count: int, cancel: Callable[[Answer], None]) -> None:
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._open = count
        self._cancel = cancel

    def put(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        while self._open:
            piece = await self._pieces.get()
            self._open -= piece.is_last
            yield piece

    def close(self) -> None:
        """Stops what is not finished: nobody waits for it."""
        if self._open:
            self._cancel(self)


class Text:
    """A text in the hands of the engine."""

    def __init__(self, wish: Wish, index: int, answer: Answer) -> None:
        self.wish, self.index, self.answer = wish, index, answer
        self.generated: list[int] = []
        self.generator: Any = None
        self.is_cancelled = False
        self._text: GrowingText | None = None

    @property
    def sampling(self) -> Sampling:
        return self.wish.sampling

    def begin(self, decode: Decode, generator: Any) -> None:
        self._text = GrowingText(decode, self.wish.prompt, self.wish.stops)
        self.generator = generator

    def take(self, token: int | None, ends: frozenset[int]) -> Piece:
        """The next token, as the client gets it."""
        assert self._text is not None
        if token is None:
            return Piece(self.index, error=_BROKEN)
        self.generated.append(token)
        if token in ends:
            return Piece(self.index, self._text.end(), 1, STOP)
        new = self._text.add(token)
        if not self._text.is_stopped and len(self.generated) >= self.wish.max_tokens:
            new += self._text.end()
            return Piece(self.index, new, 1, STOP if self._text.is_stopped else LENGTH)
        return Piece(self.index, new, 1, STOP if self._text.is_stopped else None)


def prefill_groups(lengths: Sequence[int], most_tokens: int) -> list[int]:
    """How many prompts, in their order, are computed together: padding at most doubles the work. Pure."""
    sizes: list[int] = []
    real = longest = count = 0
    for length in lengths:
        wider = max(longest, length)
        is_wasteful = (count + 1) * wider > 2 * (real + length)
        if count and (is_wasteful or (count + 1) * wider > most_tokens):
            sizes.append(count)
            real = count = 0
            wider = length
        real, longest, count = real + length, wider, count + 1
    return [*sizes, count] if count else sizes
