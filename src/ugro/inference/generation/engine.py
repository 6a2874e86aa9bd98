"""The thread that generates: it takes waiting texts in, computes one token for all of them at once, and lets those that
are finished go, at every token. So a request never waits for the end of another while there is room in the batch.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ugro.inference.cores import settle_threads
from ugro.inference.generation.cache import Rows
from ugro.inference.generation.choice import choose, random_numbers
from ugro.inference.generation.sequence import Answer, Piece, Text, Wish, prefill_groups
from ugro.inference.generation.text import Decode
from ugro.inference.metrics import Metrics
from ugro.inference.options import Limits
from ugro.inference.refusals import queue_full

log = logging.getLogger(__name__)

_MOST_PREFILL_TOKENS = 8192
_NO_MEMORY = "out of memory on its device; try a shorter prompt, or a smaller --max-batch"
Pieces = list[tuple[Answer, Piece]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model needs to be run."""

    model: Any
    decode: Decode
    ends: frozenset[int]  # tokens that end a text


class Engine:
    def __init__(self, parts: Parts, limits: Limits, metrics: Metrics, post: Callable[[Pieces], None]) -> None:
        """``post`` hands pieces to the event loop; it is called from the engine's thread."""
        self._parts, self._limits, self._metrics, self._post = parts, limits, metrics, post
        self._changed = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []
        self._rows = Rows()
        self._is_closed = False
        self.failure: str | None = None

    def submit(self, wishes: Sequence[Wish]) -> Answer:
        answer = Answer(len(wishes), self._cancel)
        texts = [Text(wish, index, answer) for index, wish in enumerate(wishes)]
        with self._changed:
            if len(self._waiting) + len(texts) > self._limits.queue:
                raise queue_full(len(self._waiting), self._retry_s())
            self._waiting.extend(texts)
            self._changed.notify()
        self._metrics.tokens("prompt", sum(len(wish.prompt) for wish in wishes))
        return answer

    def waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def run(self) -> None:
        """Until it is closed, or the model fails in a way that another request would meet, too."""
        try:
            with torch.inference_mode():
                settle_threads(self._sample, self._parts.model.device)
                while (joining := self._next()) is not None:
                    self._turn(joining)
        except Exception as error:
            log.exception("generation failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._fail([*self._running, *self._waiting], self.failure)

    def _sample(self) -> None:
        """A bit of what it will do all day: some short prompts, and two tokens more."""
        rows, tokens = Rows(), [0] * min(4, self._limits.max_batch)
        rows.prefill(self._parts.model, [[0] * 8 for _ in tokens])
        rows.step(self._parts.model, tokens)
        rows.step(self._parts.model, tokens)

    def _retry_s(self) -> int:
        """A round of the batch takes about a second; nobody waits for more than half a minute."""
        return min(30, 1 + len(self._waiting) // self._limits.max_batch)

    def _cancel(self, answer: Answer) -> None:
        with self._changed:
            for text in (*self._waiting, *self._running):
                if text.answer is answer:
                    text.is_cancelled = True
            self._changed.notify()

    def _next(self) -> list[Text] | None:
        """Waits until there is something to do. Returns the texts that join; None when it is closed."""
        with self._changed:
            while not (self._waiting or self._running or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            kept = [text for text in self._waiting if not text.is_cancelled]
            room = self._limits.max_batch - sum(not text.is_cancelled for text in self._running)
            self._waiting = deque(kept[max(0, room) :])
            return kept[: max(0, room)]

    def _turn(self, joining: list[Text]) -> None:
        self._drop([text for text in self._running if text.is_cancelled])
        for size in prefill_groups([len(text.wish.prompt) for text in joining], _MOST_PREFILL_TOKENS):
            group, joining = joining[:size], joining[size:]
            self._begin(group)
        if self._running:
            self._step()

    def _begin(self, group: list[Text]) -> None:
        model = self._parts.model
        try:
            logits = self._rows.prefill(model, [text.wish.prompt for text in group])
        except torch.OutOfMemoryError:
            if len(group) == 1:
                self._fail(group, _NO_MEMORY)
                return
            for text in group:  # one of them may be too long for the others
                self._begin([text])
            return
        for text in group:
            text.begin(self._parts.decode, random_numbers(text.sampling, model.device))
        self._running.extend(group)
        self._took(group, logits)

    def _step(self) -> None:
        try:
            logits = self._rows.step(self._parts.model, [text.generated[-1] for text in self._running])
        except torch.OutOfMemoryError:
            # Some layers have the new column, others have not: none of these texts can go on.
            self._fail(self._running, _NO_MEMORY)
            self._running, self._rows = [], Rows()
            return
        self._took(self._running, logits)

    def _took(self, texts: Sequence[Text], logits: Any) -> None:
        self._metrics.batch(len(texts))
        self._metrics.tokens("generated", len(texts))
        tokens = choose(logits, texts)
        pieces = [(text, text.take(token, self._parts.ends)) for text, token in zip(texts, tokens, strict=True)]
        self._drop([text for text, piece in pieces if piece.is_last])
        self._post([(text.answer, piece) for text, piece in pieces if piece.text or piece.tokens or piece.is_last])

    def _drop(self, texts: Iterable[Text]) -> None:
        if gone := set(map(id, texts)):
            rows = [at for at, text in enumerate(self._running) if id(text) not in gone]
            self._running = [self._running[at] for at in rows]
            self._rows.keep(rows)

    def _fail(self, texts: Sequence[Text], reason: str) -> None:
        self._post([(text.answer, Piece(text.index, error=reason)) for text in texts])
