"""One text that is being generated, and the answer to a request, which may have several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# --- sampling ---------------------------------------------------------------------------------------------------------
# How the next token of a text is chosen: its client's settings.


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0: always the likeliest
    top_p: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """A division by less would leave the range of floating point numbers."""
        return self.temperature < 1e-4

    @property
    def is_plain(self) -> bool:
        return not (self.frequency_penalty or self.presence_penalty or self.logit_bias)


# --- text -------------------------------------------------------------------------------------------------------------
# Text that grows token by token: whole characters only, and never a part of a stop text. Pure.


CONTEXT = 6  # tokens of the prompt that are decoded, too: some tokenizers drop the space before the first one
_UNFINISHED = "\ufffd"  # a character of which some bytes are still to come
_MOST_PENDING = 8  # tokens without a whole character: only the last one is not known then
_CHARACTER = 4  # the most tokens of a character

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    def __init__(self, decode: Decode, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens = list(prompt[-CONTEXT:])
        self._shown = len(self._tokens)  # tokens whose text was returned
        self._start = 0  # where decoding begins: a bit before, so that spaces come out right
        self._before = decode(self._tokens) if self._tokens else ""
        self._held = ""  # may be the beginning of a stop text
        self.is_stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after this token."""
        self._tokens.append(token)
        return self._passed(self._new())

    def end(self) -> str:
        """What was held back; nothing more comes."""
        if self.is_stopped:
            return ""
        rest = self._decode(self._tokens[self._start :])[len(self._before) :]
        held, self._held = self._held + rest, ""
        return self._cut(held)

    def _new(self) -> str:
        text = self._decode(self._tokens[self._start :])
        known = text.removesuffix(_UNFINISHED)  # only the last character can still change
        is_pending = len(text) <= len(self._before) or known != text
        if is_pending and len(self._tokens) - self._shown < _MOST_PENDING:
            return ""
        new = known[len(self._before) :]
        start = self._shown if known == text else max(self._start, len(self._tokens) - _CHARACTER)
        self._start, self._shown = start, len(self._tokens)
        self._before = self._decode(self._tokens[start:])[: len(known) - len(text) or None]
        return new

    def _passed(self, new: str) -> str:
        text = self._cut(self._held + new)
        if self.is_stopped:
            return text
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _cut(self, text: str) -> str:
        """Up to the first stop text, if it has one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if not places:
            return text
        self.is_stopped = True
        return text[: min(places)]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


# --- sequence ---------------------------------------------------------------------------------------------------------


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
