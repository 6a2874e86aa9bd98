"""A causal language model that answers: prompts in, texts out. It owns the engine and its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ugro.inference.generation.engine import Engine, Parts, Pieces
from ugro.inference.generation.prompts import Prompts
from ugro.inference.generation.sampling import Sampling
from ugro.inference.generation.sequence import Answer, Wish
from ugro.inference.metrics import Metrics
from ugro.inference.options import Limits
from ugro.inference.refusals import bad, model_failed, too_long


class Generator:
    def __init__(self, model: Any, tokenizer: Any, limits: Limits, metrics: Metrics) -> None:
        self.prompts = Prompts(tokenizer, model.config)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        parts = Parts(model, self.prompts.decode, _ends(model, tokenizer))
        self._engine = Engine(parts, limits, metrics, self._post)
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._on_failure: Callable[[str], None] | None = None
        self.waiting, self.running = self._engine.waiting, self._engine.running

    def start(self, on_failure: Callable[[str], None]) -> None:
        """In the event loop that gets the pieces."""
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()

    def wish(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None, default: int | None = None
    ) -> Wish:
        """Raises Refused for what does not fit into the model's context."""
        context, most = self.prompts.context, self._limits.max_tokens
        if not prompt:
            raise bad("the prompt is empty: it has no tokens", "prompt")
        if most is not None and max_tokens is not None and max_tokens > most:
            raise bad(f"this server generates at most {most} tokens for an answer", "max_tokens")
        room = context - len(prompt)
        if room < max(1, max_tokens or 0):
            raise too_long(len(prompt), max_tokens or 1, context)
        wanted = max_tokens or min(room, default or room, most or room)
        return Wish(tuple(prompt), wanted, sampling)

    def ask(self, wishes: Sequence[Wish], count: int, stops: Sequence[str]) -> Answer:
        """``count`` texts for each wish, in this order."""
        if self._engine.failure is not None:
            raise model_failed(self._engine.failure)
        if (texts := count * len(wishes)) > self._limits.queue:  # to come back later would not help
            raise bad(f"{texts} texts in one request; this server takes at most {self._limits.queue}", "prompt")
        return self._engine.submit([_numbered(wish, at, stops) for wish in wishes for at in range(count)])

    async def try_out(self) -> None:
        """Generates a token, so that what cannot work fails before the first client comes."""
        token = self.prompts.text("a") or (0,)
        answer = self.ask([Wish(token[:1], 1, Sampling(temperature=0))], 1, ())
        async for piece in answer.pieces():
            if piece.error is not None:
                raise model_failed(piece.error)

    def close(self) -> None:
        self._engine.close()

    def _run(self) -> None:
        self._engine.run()
        if self._engine.failure is not None and self._loop is not None and self._on_failure is not None:
            self._loop.call_soon_threadsafe(self._on_failure, self._engine.failure)

    def _post(self, pieces: Pieces) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_deliver, pieces)


def _deliver(pieces: Pieces) -> None:
    for answer, piece in pieces:
        answer.put(piece)


def _numbered(wish: Wish, at: int, stops: Sequence[str]) -> Wish:
    """Several texts of one prompt and seed differ, and come out the same again."""
    seed = wish.sampling.seed
    sampling = wish.sampling if seed is None else replace(wish.sampling, seed=seed + at)
    return replace(wish, sampling=sampling, stops=tuple(stops))


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """A model names one or several; a tokenizer that was changed later may have another."""
    named = [tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
    flat = [token for one in named for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in flat if isinstance(token, int))
