"""Generates texts: keys and values of all running sequences are in one tensor per layer, so one step serves all.

Rows are aligned at their end: the last token of each is in the last column, and what is left of its first is padding,
which the attention mask hides. So rows of any length can join and leave between two tokens, and a row's result does not
depend on the others but for rounding.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ugro.features.services.inference.guard import Metrics, bad, model_failed, queue_full, too_long
from ugro.features.services.inference.loading import settle_threads
from ugro.features.services.inference.options import Limits
from ugro.features.services.inference.sequence import Answer, Decode, Piece, Sampling, Text, Wish, prefill_groups

_ROOM = 64  # columns that are added at once, so that most steps copy nothing


class _Rows(DynamicLayer):  # type: ignore[misc]  # transformers has no types that mypy knows
    """One layer. Its tensors have room for more columns than are used."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: tuple[Any, Any] | None = None
        self._used = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        end = self._used + key_states.shape[-2]
        if self._stored is None or end > self._stored[0].shape[-2]:
            self._move(end + _ROOM, key_states, value_states)
        for stored, new in zip(self._stored or (), (key_states, value_states), strict=True):
            stored[:, :, self._used : end] = new
        self._show(end)
        return self.keys, self.values

    def place(self, tensors: tuple[Any, Any], used: int) -> None:
        self._stored = tensors
        self.is_initialized = True
        self._show(used)

    def _move(self, columns: int, *samples: Any) -> None:
        old, used = self._stored, self._used
        keys, values = (_empty(sample, sample.shape[0], columns) for sample in samples)
        if old is not None:
            keys[:, :, :used], values[:, :, :used] = old[0][:, :, :used], old[1][:, :, :used]
        self.dtype, self.device = samples[0].dtype, samples[0].device
        self.place((keys, values), used)

    def _show(self, used: int) -> None:
        stored = self._stored or ()
        self._used = used
        self.keys, self.values = (tensor[:, :, :used] for tensor in stored)


class Rows:
    """All layers, and how many tokens each row has."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._cache: Any = None

    @property
    def columns(self) -> int:
        return max(self.lengths, default=0)

    def step(self, model: Any, tokens: Sequence[int]) -> Any:
        """One more token for each row; returns the logits of the next ones."""
        device = model.device
        lengths = torch.tensor(self.lengths, device=device)
        columns = torch.arange(self.columns + 1, device=device)
        logits = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            attention_mask=(columns[None, :] >= (self.columns - lengths)[:, None]).long(),
            past_key_values=self._cache,
            use_cache=True,
            **_positions(model, lengths[:, None]),
        ).logits[:, -1]
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def prefill(self, model: Any, prompts: Sequence[Sequence[int]]) -> Any:
        """Adds rows; returns the logits of their first new tokens."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        # Padded on the right: no token looks ahead, so none sees the padding, and nothing has to be masked.
        padded = [[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts]
        ids = torch.tensor(padded, device=model.device)
        last, kept = _last_positions(model, lengths)
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            use_cache=True,
            **_positions(model, torch.arange(longest, device=model.device)[None, :].expand(ids.shape)),
            **kept,
        ).logits
        self._join(cache, lengths)
        return logits[torch.arange(len(prompts), device=model.device), last]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all other rows, and the columns that were theirs alone."""
        if len(rows) == len(self.lengths):
            return
        before = self.columns
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._cache = None
            return
        columns = self.columns
        for layer in self._cache.layers:
            index = torch.tensor(rows, device=layer.keys.device)
            tensors = []
            for old in (layer.keys, layer.values):
                new = _empty(old, len(rows), columns + _ROOM)
                new[:, :, :columns] = old.index_select(0, index)[:, :, before - columns :]
                tensors.append(new)
            layer.place((tensors[0], tensors[1]), columns)

    def _join(self, cache: Any, lengths: Sequence[int]) -> None:
        """All or nothing: there may be no memory for the larger tensors, and the rows that run then go on."""
        before, running = self.columns, len(self.lengths)
        together = [*self.lengths, *lengths]
        columns = max(together)
        old_layers = self._cache.layers if running else [None] * len(cache.layers)
        layers = []
        for old, new in zip(old_layers, cache.layers, strict=True):
            joined = _Rows()
            pairs = (("keys", new.keys), ("values", new.values))
            tensors = []
            for name, added in pairs:
                tensor = _empty(added, len(together), columns + _ROOM)
                if old is not None:
                    tensor[:running, :, columns - before : columns] = getattr(old, name)
                for at, length in enumerate(lengths):
                    tensor[running + at, :, columns - length : columns] = added[at, :, :length]
                tensors.append(tensor)
            joined.dtype, joined.device = new.keys.dtype, new.keys.device
            joined.place((tensors[0], tensors[1]), columns)
            layers.append(joined)
        self.lengths, self._cache = together, Cache(layers=layers)


def _empty(like: Any, rows: int, columns: int) -> Any:
    """Zeros and not just anything: what the mask hides is multiplied by 0, which does not hide NaN."""
    return torch.zeros((rows, like.shape[1], columns, like.shape[3]), dtype=like.dtype, device=like.device)


def _positions(model: Any, positions: Any) -> dict[str, Any]:
    return {"position_ids": positions} if "position_ids" in parameters(model) else {}


def _last_positions(model: Any, lengths: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Where the logits of each row's last token are, and what to ask for: not those of all tokens, if that can be."""
    if "logits_to_keep" not in parameters(model):
        return torch.tensor([length - 1 for length in lengths], device=model.device), {}
    wanted = sorted({length - 1 for length in lengths})
    place = torch.tensor([wanted.index(length - 1) for length in lengths], device=model.device)
    return place, {"logits_to_keep": torch.tensor(wanted, device=model.device)}


def parameters(model: Any) -> frozenset[str]:
    """The names that a model's forward takes."""
    import inspect

    return frozenset(inspect.signature(type(model).forward).parameters)


# --- choice -----------------------------------------------------------------------------------------------------------
# Which token comes next: the likeliest one, or a drawn one, by each text's own settings.


class Row(Protocol):
    """What choosing a token needs of a text."""

    @property
    def sampling(self) -> Sampling: ...

    generated: list[int]
    generator: Any


def random_numbers(sampling: Sampling, device: Any) -> Any:
    """Of its own for each text: what it draws does not depend on who else is there."""
    made = torch.Generator(device=device)
    if sampling.seed is None:
        made.seed()
    else:
        made.manual_seed(sampling.seed % 2**63)
    return made


def choose(logits: Any, rows: Sequence[Row]) -> list[int | None]:
    """A token for each row; None for a row whose logits are no numbers: nothing can be drawn from them."""
    for at, row in enumerate(rows):
        if not row.sampling.is_plain:
            _adjust(logits[at], row)
    highest, likeliest = logits.max(dim=-1)
    is_broken = (~torch.isfinite(highest)).tolist()
    found: list[int | None] = likeliest.tolist()
    for at, row in enumerate(rows):
        if is_broken[at]:
            found[at] = None
        elif not row.sampling.is_greedy:
            found[at] = _draw(logits[at], row)
    return found


def _adjust(logits: Any, row: Row) -> None:
    """As OpenAI describes it: penalties of what was generated, and a bias of single tokens."""
    sampling = row.sampling
    if row.generated and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = torch.tensor(row.generated, device=logits.device).unique(return_counts=True)
        logits[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < logits.shape[0]:
            logits[token] += bias


def _draw(logits: Any, row: Row) -> int:
    sampling = row.sampling
    chances = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p >= 1:
        return int(torch.multinomial(chances, 1, generator=row.generator))
    ordered, tokens = chances.sort(descending=True)
    # The token that passes the limit belongs to it; so there is always one.
    ordered[ordered.cumsum(dim=-1) - ordered > sampling.top_p] = 0
    return int(tokens[torch.multinomial(ordered, 1, generator=row.generator)])


# --- engine -----------------------------------------------------------------------------------------------------------
# The thread that generates: it takes waiting texts in, computes one token for all of them at once, and lets those that
# are finished go, at every token. So a request never waits for the end of another while there is room in the batch.


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


# --- prompts ----------------------------------------------------------------------------------------------------------
# From what a client sends to tokens: the chat template of the tokenizer, or a plain one where it has none.


Message = Mapping[str, str]
# Without a template the model has not learned where a turn ends: it would go on with the user's part.
PLAIN_STOPS = ("\nuser:", "\nsystem:")
_UNKNOWN_CONTEXT = 2048


class Prompts:
    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer = tokenizer
        self.context = _context(tokenizer, config)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    @property
    def chat_stops(self) -> tuple[str, ...]:
        return () if self.has_template else PLAIN_STOPS

    def text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Blocks for a while if the messages are long."""
        text = self._templated(messages) if self.has_template else plain(messages)
        return tuple(self._tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _templated(self, messages: Sequence[Message]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except TemplateError as error:  # such as: roles must alternate
            raise bad(f"the model's chat template refuses the messages: {error}", "messages") from error


def plain(messages: Sequence[Message]) -> str:
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def _context(tokenizer: Any, config: Any) -> int:
    """The most tokens of a prompt and its answer together."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    text = config.get_text_config(decoder=True)
    found = [size for name in names if isinstance(size := getattr(text, name, None), int) and size > 0]
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and 0 < limit < 10**9:  # without one, transformers says 10**30
        found.append(limit)
    return min(found, default=_UNKNOWN_CONTEXT)


# --- generator --------------------------------------------------------------------------------------------------------
# A causal language model that answers: prompts in, texts out. It owns the engine and its thread.


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
