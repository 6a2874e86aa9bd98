"""The keys and values of all running sequences, in one tensor per layer, so that one step computes a token for each.

Rows are aligned at their end: the last token of each is in the last column, and what is left of its first is padding,
which the attention mask hides. So rows of any length can join and leave between two tokens, and a row's result does not
depend on the others but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

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
