"""Which token comes next: the likeliest one, or a drawn one, by each text's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ugro.inference.generation.sampling import Sampling


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
